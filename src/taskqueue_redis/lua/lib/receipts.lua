-- Receipts: whether a receipt is current, and the answer to a settlement that is repeated.

local function is_adopted(q, fence, token) return call('HGET', q.name .. '/a', fence) == token end

-- Returns the stream of a current receipt, its owner, and the milliseconds since the delivery; nothing if the receipt is stale.
local function current(q, r, fence, token)
  if r.state ~= WAITING or (r.place ~= FRESH and r.place ~= AGAIN) or text(r.fence) ~= fence then return end
  local name = stream_with(q, r)
  local owner, idle = holder(name, fence)
  if owner and (owner == token or is_adopted(q, fence, token)) then return name, owner, idle end
end

-- Returns the record of a task, and what `current` returns if the receipt is.
local function delivery_of(q, id, fence, token)
  local r = read_record(call('HGET', q.name .. '/t', id))
  local name, owner, idle
  if r then name, owner, idle = current(q, r, fence, token) end
  if name then return r, name, owner, idle end
  local entry = record_of_entry(q, id, fence) -- the record is damaged, or the receipt is stale
  if not entry then return r end
  return entry, current(q, entry, fence, token)
end

local function settled_before(r, fence, verb)
  if r.verb == verb and text(r.settled) == fence then return r.answer == 1 and 'dead' or 'ok' end
  return 'lost'
end

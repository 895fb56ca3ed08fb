-- Streams, and bodies outside of streams. An entry of a stream has the task's id as its first field, with the body as
-- value. An entry of a task that has a deadline or inputs, or was delivered before, has a second field, `again` if it was delivered
-- before, else `more`, with attempt, losses, attempts before the last redrive, and deadline as value. An entry of a task
-- that has inputs has a third field. The sequence number is the first part of an entry's id, and is the fence of receipts.

-- Returns whether a task that is not in flight was never delivered, so that it counts against the capacity.
local function is_fresh(r) return r.attempt == 1 and r.handed == 0 end

-- Returns the kind of stream that has an entry.
local function kind_of(r) return r.place == AGAIN and 'r' or 's' end

local function stream_with(q, r) return stream_of(q, kind_of(r), r.priority) end

-- Adds an entry to its stream. The place and the sequence number in its record must be set before.
local function enter_stream(q, r, id, body, deadline)
  local name = stream_with(q, r)
  if #body > LARGE then q.large = true end
  if is_fresh(r) and not deadline and not has(r, KEPT) then
    call('XADD', name, text(r.fence), id, body)
    return
  end
  local kind = is_fresh(r) and 'more' or 'again'
  local more = r.attempt .. ':' .. r.losses .. ':' .. r.prior .. ':' .. (deadline or '')
  if has(r, KEPT) then
    call('XADD', name, text(r.fence), id, body, kind, more, 'inputs', '')
  else
    call('XADD', name, text(r.fence), id, body, kind, more)
  end
end

-- Returns the fields of a stream's entry; nothing if there is none.
local function fields_at(name, fence)
  local entry = call('XRANGE', name, fence, fence)[1]
  return entry and entry[2]
end

local function body_at(name, fence)
  local fields = fields_at(name, fence)
  return fields and fields[2]
end

-- Returns the position after the last delivered entry of a stream, in the format of XRANGE.
local function last_delivered(name)
  local group = of_group('XINFO', 'GROUPS', name)
  if not group or not group[1] then return '-' end
  for i = 1, #group[1], 2 do
    if group[1][i] == 'last-delivered-id' then return '(' .. group[1][i + 1] end
  end
end

-- Lets the consumer group of a stream continue after a sequence number. Returns whether the group exists.
local function move_on(name, fence) return of_group('XGROUP', 'SETID', name, 'g', fence) ~= nil end

-- Returns the consumer that has an entry in flight, and for how many milliseconds; nothing if there is none.
local function holder(name, fence)
  local entry = of_group('XPENDING', name, 'g', fence, fence, 1)
  if entry and entry[1] then return entry[1][2], entry[1][3] end
end

-- Removes an entry from its stream.
local function drop_entry(q, name, fence)
  call('XACK', name, 'g', fence)
  call('XDEL', name, fence)
  if q.timed then call('ZREM', q.name .. '/m', sub(name, -2) .. fence) end
end

local function drop_body(q, id, unread)
  local body = not unread and call('HGET', q.name .. '/b', id)
  call('HDEL', q.name .. '/b', id)
  return body
end

-- Returns the results that are delivered with a task.
local function inputs_of(q, id)
  local name, names = q.name .. '/w:' .. id, {}
  for i = 1, tonumber(call('HGET', name, 'inputs')) or 0 do names[i] = 'i' .. i end
  local inputs = names[1] and call('HMGET', name, unpack(names)) or {}
  for i = 1, #inputs do bytes = bytes + (inputs[i] and #inputs[i] or 0) end
  return inputs
end

local function deadline_of(q, id) return q.extras and call('ZSCORE', q.name .. '/e', id) or nil end

local function due_member(r, id) return string.format('%017d', r.seq) .. id end

-- Returns whether the entry of a live task or of a dead letter is where the record says.
local function is_there(q, id, r)
  local name = q.name
  if r.place == FRESH or r.place == AGAIN then
    local fields = fields_at(stream_with(q, r), text(r.fence))
    return fields and fields[1] == id
  elseif r.state == SCHEDULED then
    name, id = name .. '/d', due_member(r, id)
  else
    name = name .. (r.state == DEAD and '/dead' or r.state == BLOCKED and '/blocked' or r.place == HELD and '/j:' .. r.entity or '/z' .. r.priority)
  end
  return call('ZSCORE', name, id)
end

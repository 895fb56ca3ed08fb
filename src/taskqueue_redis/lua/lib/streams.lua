-- Streams, and bodies that are in none. An entry of a stream has the task's id as its first field and the body as its value; one
-- that has a deadline has a second field `more`, one that was handed out before `again`: attempt, losses, attempts before the last
-- redrive, deadline. The sequence is the first part of an entry's id, and fences receipts.

-- Whether an entry at rest was never handed out: it counts against the capacity.
local function is_fresh(r) return r.attempt == 1 and r.handed == 0 end

-- What lies in a stream is of one of two kinds.
local function kind_of(r) return r.place == AGAIN and 'r' or 's' end

local function stream_with(q, r) return stream_of(q, kind_of(r), r.priority) end

-- Its place and its sequence must say where.
local function enter_stream(q, r, id, body, deadline)
  local name = stream_with(q, r)
  if is_fresh(r) and not deadline then
    call('XADD', name, text(r.fence), id, body)
  else
    local more = r.attempt .. ':' .. r.losses .. ':' .. r.prior .. ':' .. (deadline or '')
    call('XADD', name, text(r.fence), id, body, is_fresh(r) and 'more' or 'again', more)
  end
end

-- What an entry of a stream has; nothing where there is none.
local function fields_at(name, fence)
  local entry = call('XRANGE', name, fence, fence)[1]
  return entry and entry[2]
end

local function body_at(name, fence)
  local fields = fields_at(name, fence)
  return fields and fields[2]
end

-- From where on the entries of a stream were never handed out, as XRANGE takes it.
local function last_delivered(name)
  local group = redis.pcall('XINFO', 'GROUPS', name)
  if group.err or not group[1] then return '-' end
  for i = 1, #group[1], 2 do
    if group[1][i] == 'last-delivered-id' then return '(' .. group[1][i + 1] end
  end
end

-- Has those that were never handed out begin after a sequence. Answers whether there is such a group.
local function move_on(name, fence) return not redis.pcall('XGROUP', 'SETID', name, 'g', fence).err end

-- Who has an entry of a stream in flight, and for how many milliseconds; nothing if nobody has.
local function holder(name, fence)
  local entry = redis.pcall('XPENDING', name, 'g', fence, fence, 1)
  if not entry.err and entry[1] then return entry[1][2], entry[1][3] end
end

-- Takes an entry out of its stream.
local function drop_entry(q, name, fence)
  call('XACK', name, 'g', fence)
  call('XDEL', name, fence)
  if q.timed then call('ZREM', q.name .. '/m', sub(name, -2) .. fence) end
end

local function drop_body(q, id)
  local body = call('HGET', q.name .. '/b', id)
  call('HDEL', q.name .. '/b', id)
  return body
end

local function deadline_of(q, id) return q.extras and call('ZSCORE', q.name .. '/e', id) or nil end

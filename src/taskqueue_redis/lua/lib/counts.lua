-- Counters and indexes that change rarely.

local function add(q, counter, n)
  if q[counter] then q[counter] = q[counter] + n else call('HINCRBY', q.name, counter, n) end
end

local function setting(q, name, default) return tonumber(call('HGET', q.name, name)) or default end

-- Returns the sequence number up to which the current purge of the queue ends tasks; 0 if there is no purge. A purge is
-- considered abandoned if its next call does not come within a minute.
local function purged_to(q)
  local upto, at = string.match(call('HGET', q.name, 'purging') or '', '^(%d+):(%d+)$')
  return upto and now < at + 60000000 and tonumber(upto) or 0
end

-- Adds a priority to `q.lanes`: the priorities in use, the highest first, as a string of digits.
local function use_lane(q, priority)
  if string.find(q.lanes, tostring(priority), 1, true) then return end
  priority = tonumber(priority)
  local lanes = {}
  for p = 9, 0, -1 do
    if p == priority or string.find(q.lanes, tostring(p), 1, true) then lanes[#lanes + 1] = p end
  end
  q.lanes = table.concat(lanes)
end

-- Adds all priorities that have data to `q.lanes`.
local function find_lanes(q)
  for priority = 0, 9 do
    local name = q.name .. '/'
    if call('EXISTS', name .. 's' .. priority, name .. 'r' .. priority, name .. 'z' .. priority, name .. 'w' .. priority) > 0 then
      use_lane(q, priority)
    end
  end
end

-- Stores the lowest score of a sorted set in an index of the partition, so that maintenance finds the queue.
local function index(q, set, into)
  local head = call('ZRANGE', q.name .. set, 0, 0, 'WITHSCORES')
  if head[2] then
    call('ZADD', PARTITION .. into, head[2], q.key)
  else
    call('ZREM', PARTITION .. into, q.key)
  end
  if into == ':due' then q.due = tonumber(head[2]) or math.huge end
end

local function note_deadline(q, id, deadline)
  q.extras = true
  call('ZADD', q.name .. '/e', deadline, id)
  index(q, '/e', ':deadlines')
end

-- One queue: its names, its counters, and its places. Counters are written once, by `save`.
local queues = {}
local replicas = 0 -- how many must have it before it is confirmed

local function queue(key)
  local q = queues[key]
  if not q then
    local name = PARTITION .. ':q:' .. key
    local v = call('HMGET', name, 'waiting', 'back', 'lanes', 'window', 'result_ttl', 'max_losses', 'journal',
      'replicas', 'due', 'extras')
    q = {key = key, due = tonumber(v[9]), extras = v[10], name = name, waiting = tonumber(v[1]), back = tonumber(v[2]) or 0, lanes = v[3] or '',
      window = tonumber(v[4]) or 300000000, result_ttl = tonumber(v[5]) or 3600000000,
      max_losses = tonumber(v[6]) or 5, journal = v[7], change = {}}
    replicas = math.max(replicas, tonumber(v[8]) or 0)
    q.known = q.waiting ~= nil
    q.waiting = q.waiting or 0
    queues[key] = q
  end
  return q
end

local function add(q, counter, n)
  q.change[counter] = (q.change[counter] or 0) + n
end

local function save(q)
  local waiting = q.change.waiting or 0
  if not q.known then
    call('SADD', PARTITION .. ':queues', q.key)
    if waiting == 0 then call('HSET', q.name, 'waiting', 0) end
    q.known = true
  end
  for counter, n in pairs(q.change) do
    if n ~= 0 then call('HINCRBY', q.name, counter, n) end
  end
  local before, after = q.waiting, q.waiting + waiting
  if before == 0 and after > 0 then
    call('SADD', PARTITION .. ':ready', q.key)
  elseif before > 0 and after == 0 then
    call('SREM', PARTITION .. ':ready', q.key)
  end
  q.waiting = after
  q.back = q.back + (q.change.back or 0)
  q.change = {}
  if q.ring and before == 0 then call('PUBLISH', PARTITION .. ':bell:' .. q.key, '') end
  q.ring = false
end

-- Writes in any case where replicas must confirm: WAIT counts from what its connection wrote last.
local function mark()
  if replicas > 0 then call('HINCRBY', META, 'marks', 1) end
end

local function save_all()
  for _, q in pairs(queues) do save(q) end
  mark()
  keep_seq()
end

-- The lanes in use, the highest priority first, as a string of digits.
local function use_lane(q, priority)
  if q.lanes == priority or string.find(q.lanes, tostring(priority), 1, true) then return end
  priority = tonumber(priority)
  local lanes = {}
  for p = 9, 0, -1 do
    if p == priority or string.find(q.lanes, tostring(p), 1, true) then lanes[#lanes + 1] = p end
  end
  q.lanes = table.concat(lanes)
  call('HSET', q.name, 'lanes', q.lanes)
end

local function stream_of(q, kind, priority) return q.name .. '/' .. kind .. priority end

-- Keeps with the queue that it has deadlines, results, progress or adopted deliveries, or once had.
local function note_extras(q)
  if not q.extras then
    q.extras = '1'
    call('HSET', q.name, 'extras', '1')
  end
end

-- Keeps with the queue when its next scheduled task falls due.
local function note_due(q, due)
  q.due = tonumber(due)
  if due then call('HSET', q.name, 'due', due) else call('HDEL', q.name, 'due') end
end

-- The lowest score of a sorted set, kept in an index of the partition so that housekeeping finds the queue.
local function index(q, set, into)
  local head = call('ZRANGE', q.name .. set, 0, 0, 'WITHSCORES')
  if head[2] then
    call('ZADD', PARTITION .. into, head[2], q.key)
  else
    call('ZREM', PARTITION .. into, q.key)
  end
  if into == ':due' then note_due(q, head[2]) end
end

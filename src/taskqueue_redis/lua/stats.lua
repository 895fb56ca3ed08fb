--@ base queue states record counts flow tenants lanes places
-- A queue at a glance. ARGV: key. Answers its counters as pairs, since when the oldest waits (""), its subscribers.
local q = queue(ARGV[3])
local oldest = nil

local function consider(seq)
  if seq and (not oldest or seq < oldest) then oldest = seq end
end

local function consider_first(set)
  local first = tonumber(call('ZRANGE', q.name .. set, 0, 0, 'WITHSCORES')[2])
  consider(first and first < 0 and first + RETURNED or first)
end

consider_first('/J')
for i = 1, #q.lanes do
  local priority = string.sub(q.lanes, i, i)
  consider_first('/z' .. priority)
  consider_first('/w' .. priority)
  local name = stream_of(q, 's', priority)
  local head = call('XRANGE', name, last_delivered(name), '+', 'COUNT', 1)[1]
  consider(head and tonumber(string.match(head[1], '^(%d+)')))
end
local counters = call('HGETALL', q.name)
for _, name in ipairs({'waiting', 'in_flight', 'published', 'delivered', 'done'}) do
  counters[#counters + 1] = name
  counters[#counters + 1] = text(q[name])
end
return {counters, oldest and text(math.min(oldest, now)) or '', call('HGET', PARTITION .. ':subs', q.key) or '0'}

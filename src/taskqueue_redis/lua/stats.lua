--@ base queue
-- A queue at a glance. ARGV: key. Answers its counters as pairs, since when the oldest waits (""), its subscribers.
local q = queue(ARGV[3])
local oldest = nil

local function consider(seq)
  if seq and (not oldest or seq < oldest) then oldest = seq end
end

for i = 1, #q.lanes do
  local priority = string.sub(q.lanes, i, i)
  consider(tonumber(call('ZRANGE', q.name .. '/z' .. priority, 0, 0, 'WITHSCORES')[2]))
  local name = stream_of(q, 's', priority)
  local group = redis.pcall('XINFO', 'GROUPS', name)
  local last = '-'
  if not group.err and group[1] then
    for j = 1, #group[1], 2 do
      if group[1][j] == 'last-delivered-id' then last = '(' .. group[1][j + 1] end
    end
  end
  local head = call('XRANGE', name, last, '+', 'COUNT', 1)[1]
  consider(head and tonumber(string.match(head[1], '^(%d+)')))
end
local counters = call('HGETALL', q.name)
for _, name in ipairs({'waiting', 'in_flight', 'published', 'delivered', 'done'}) do
  counters[#counters + 1] = name
  counters[#counters + 1] = text(q[name])
end
return {counters, oldest and text(math.min(oldest, now)) or '', call('HGET', PARTITION .. ':subs', q.key) or '0'}

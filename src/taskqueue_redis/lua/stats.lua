--@ base queue states record counts streams flow tenants lanes places
-- Returns the statistics of a queue. ARGV: key. Returns its counters as pairs, the time since which the oldest task has
-- waited ("" if none waits), and its number of subscribers.
local q = queue(ARGV[3])
local oldest = nil

local function consider(seq)
  if seq and (not oldest or seq < oldest) then oldest = seq end
end

local function consider_place(place)
  place = tonumber(place)
  consider(place and place < 0 and place + RETURNED or place)
end

local function consider_first(set) consider_place(call('ZRANGE', q.name .. set, 0, 0, 'WITHSCORES')[2]) end

consider_first('/J')
for i = 1, #q.lanes do
  local priority = sub(q.lanes, i, i)
  consider_first('/z' .. priority)
  local _, head = first_tenant(q, priority)
  consider_place(head)
  if not q.sorted or q.waiting > q.laned + q.held then
    local name = stream_of(q, 's', priority)
    local head = call('XRANGE', name, last_delivered(name), '+', 'COUNT', 1)[1]
    consider(head and tonumber(string.match(head[1], '^(%d+)')))
  end
end
local counters = call('HGETALL', q.name)
for _, name in ipairs({'waiting', 'in_flight', 'published', 'delivered', 'done'}) do
  counters[#counters + 1] = name
  counters[#counters + 1] = text(q[name])
end
counters[#counters + 1] = 'blocked_on_dead'
counters[#counters + 1] = text(call('ZCARD', q.name .. '/blocked_on_dead'))
return {counters, oldest and text(math.min(oldest, now)) or '', call('HGET', PARTITION .. ':subs', q.key) or '0'}

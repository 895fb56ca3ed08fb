--@ base queue states record counts streams flow tenants lanes places
-- Returns the statistics of queues. ARGV: keys. Returns for each, and only for the first ones if tenants without tasks were
-- removed on the way: its counters as pairs, the time since which the oldest task has waited ("" if none waits), and its
-- number of subscribers.
local keys, answers, looked = {unpack(ARGV, 3)}, {}, 0
local subscribers = call('HMGET', PARTITION .. ':subs', unpack(keys))

-- Returns the time since which the oldest task has waited.
local function oldest_in(q)
  local oldest = math.huge

  local function consider(place)
    place = tonumber(place) or math.huge
    oldest = math.min(oldest, place < 0 and place + RETURNED or place)
  end

  local function consider_first(set) consider(call('ZRANGE', q.name .. set, 0, 0, 'WITHSCORES')[2]) end

  consider_first('/J')
  for i = 1, #q.lanes do
    local priority = sub(q.lanes, i, i)
    consider_first('/z' .. priority)
    local _, head = first_tenant(q, priority)
    consider(head)
    if not q.sorted or q.waiting > q.laned + q.held then
      local name = stream_of(q, 's', priority)
      local head = call('XRANGE', name, last_delivered(name), '+', 'COUNT', 1)[1]
      consider(head and string.match(head[1], '^(%d+)'))
    end
  end
  return oldest < math.huge and text(math.min(oldest, now)) or ''
end

for i = 1, #keys do
  local q = queue(keys[i])
  local oldest, counters = q.waiting > 0 and oldest_in(q) or '', call('HGETALL', q.name)
  for _, name in ipairs({'waiting', 'in_flight', 'published', 'delivered', 'done'}) do
    counters[#counters + 1] = name
    counters[#counters + 1] = text(q[name])
  end
  counters[#counters + 1] = 'blocked_on_dead'
  counters[#counters + 1] = text(call('ZCARD', q.name .. '/blocked_on_dead'))
  answers[i], looked = {counters, oldest, subscribers[i] or '0'}, looked + q.looked
  if looked >= LOOKED_AT then break end
end
return answers

--@ base room life queue states record counts streams flow tenants lanes cold journal places ends promote returns timing
-- One run of maintenance, with a limited amount of work. Several processes may run it at the same time.
-- ARGV: microseconds after which a silent consumer's lease expires, usual maximum interval between two runs, budget,
-- milliseconds after which an unregistered member without deliveries is removed.
-- Returns how many tasks were promoted, the expired tasks as {key, id, attempt}, how many were deleted and recovered,
-- the number of anomalies so far, consumers whose lease has expired as {token, worker}, queues with waiting tasks but no
-- consumer, and how often the clock of Redis was set back so far and by how many microseconds the last time.
local lease, period, budget = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
lift_refusal()

-- If maintenance has not run for a while, every consumer gets a whole lease before its deliveries are taken back.
local real = store_time()
local guard = call('HMGET', META, 'swept', 'armed')
local armed = tonumber(guard[2]) or real
if not guard[1] or real - guard[1] > 3 * period or not guard[2] then
  armed = real
  call('HSET', META, 'armed', text(real))
end
call('HSET', META, 'swept', text(real))

local promoted = promote_due(budget)

local expired = {}
local late = call('ZRANGEBYSCORE', PARTITION .. ':deadlines', '-inf', text(now), 'LIMIT', 0, budget)
for i = 1, #late do
  local q = queue(late[i])
  local ids = call('ZRANGEBYSCORE', q.name .. '/e', '-inf', text(now), 'LIMIT', 0, budget - #expired)
  for j = 1, #ids do
    local r = read_record(call('HGET', q.name .. '/t', ids[j]))
    end_live(q, ids[j], r, EXPIRED, 'expired')
    expired[#expired + 1] = {q.key, ids[j], r.attempt}
  end
  index(q, '/e', ':deadlines')
  if #expired >= budget then break end
end

local recovered, dead = 0, {}
if real - armed > lease then
  local silent = call('ZRANGEBYSCORE', PARTITION .. ':alive', '-inf', text(real - lease), 'LIMIT', 0, 100)
  for i = 1, #silent do
    local worker = call('HGET', PARTITION .. ':c:' .. silent[i], 'worker') or ''
    local taken, all = take_back(silent[i], true, budget - recovered)
    recovered = recovered + taken
    if all then dead[#dead + 1] = {silent[i], worker} end
    if recovered >= budget then break end
  end
end

recovered = recovered + end_hung(budget)

-- `at`: when the task ended, according to the list of ends; nil if its result has expired, because a task that has a
-- result is skipped in that list.
local forgotten = 0
local function forget(q, id, at)
  local packed = call('HGET', q.name .. '/t', id)
  if not packed then return end
  local r = read_record(packed)
  if not is_over(r) or (at and r.at ~= at) or call('ZSCORE', q.name .. '/k', id) then return end
  if r.at + q.window > now then return remember(q, id, r.at) end
  call('HDEL', q.name .. '/t', id)
  call('HDEL', q.name .. '/x', id)
  call('HDEL', q.name .. '/p', id)
  forgotten = forgotten + 1
end

local old = call('ZRANGEBYSCORE', PARTITION .. ':results', '-inf', text(now), 'LIMIT', 0, budget)
local looked = 0
for i = 1, #old do
  local q = queue(old[i])
  local ids = call('ZRANGEBYSCORE', q.name .. '/k', '-inf', text(now), 'LIMIT', 0, budget - looked)
  for j = 1, #ids do
    call('ZREM', q.name .. '/k', ids[j])
    call('HDEL', q.name .. '/o', ids[j])
    forget(q, ids[j])
  end
  looked = looked + #ids
  index(q, '/k', ':results')
  if looked >= budget then break end
end

looked = 0
local ended = call('ZRANGEBYSCORE', PARTITION .. ':forget', '-inf', text(now), 'LIMIT', 0, budget)
for i = 1, #ended do
  local q = queue(ended[i])
  local list = q.name .. '/l'
  local items = call('LRANGE', list, 0, budget - looked - 1)
  local n, head = 0, nil
  for j = 1, #items do
    local at, id = string.match(items[j], '^(%d+):(.*)$')
    at = tonumber(at)
    if at + q.window > now then
      head = at
      break
    end
    forget(q, id, at)
    n = j
  end
  call('LTRIM', list, n, -1)
  if not head then
    local first = call('LINDEX', list, 0)
    head = first and tonumber(string.match(first, '^(%d+):'))
  end
  if head then
    call('ZADD', PARTITION .. ':forget', text(head + q.window), q.key)
  else
    call('ZREM', PARTITION .. ':forget', q.key)
  end
  looked = looked + n
  if looked >= budget then break end
end
-- Checks one queue per run for inconsistencies that only other programs can cause: wrong counters, unknown members of
-- its groups.
local some = call('SRANDMEMBER', PARTITION .. ':queues')
if some then
  local q = queue(some)
  recount(q)
  if q.sorted then repair_keys(q) end
  for i = 1, #q.lanes do
    for _, kind in ipairs({'s', 'r'}) do
      local name = stream_of(q, kind, sub(q.lanes, i, i))
      local members = redis.pcall('XINFO', 'CONSUMERS', name, 'g')
      for j = 1, members.err and 0 or #members do
        local token, pending, idle = members[j][2], members[j][4], members[j][6]
        if pending == 0 and idle > tonumber(ARGV[6]) and not call('ZSCORE', PARTITION .. ':alive', token) then
          call('XGROUP', 'DELCONSUMER', name, 'g', token)
        end
      end
    end
  end
end

local unclaimed = {}
save_all()
local ready = call('SMEMBERS', PARTITION .. ':ready')
for i = 1, #ready do
  if not call('HGET', PARTITION .. ':subs', ready[i]) then unclaimed[#unclaimed + 1] = ready[i] end
end
local seen = call('HMGET', META, 'anomalies', 'steps', 'step')
return {promoted, expired, forgotten, recovered, seen[1] or '0', dead, unclaimed, seen[2] or '0', seen[3] or '0'}

-- Removal of queues that have no tasks.

local asked = 0 -- number of consumers that were asked for their queues

-- Returns how many consumers have subscribed to a queue. The stored number is too high if another program has deleted
-- the queues of a consumer; it is corrected. Asks a limited number of consumers.
local function subscribers(q)
  local counted = tonumber(call('HGET', PARTITION .. ':subs', q.key)) or 0
  local tokens = counted > 0 and asked < 2000 and call('ZRANGE', PARTITION .. ':alive', 0, 1000) or {}
  if counted == 0 or asked >= 2000 or #tokens > 1000 then return counted end
  local number = 0
  for i = 1, #tokens do number = number + call('SISMEMBER', PARTITION .. ':k:' .. tokens[i], q.key) end
  asked = asked + #tokens
  if number ~= counted then
    call('HINCRBY', META, 'anomalies', 1)
    if number > 0 then call('HSET', PARTITION .. ':subs', q.key, number) else call('HDEL', PARTITION .. ':subs', q.key) end
  end
  return number
end

-- Returns how a queue is used: its numbers of waiting, scheduled and running tasks, dead letters, subscriptions, and
-- blocked tasks.
local function uses(q)
  recount(q)
  return {q.waiting, call('ZCARD', q.name .. '/d'), q.in_flight, call('ZCARD', q.name .. '/dead'),
    subscribers(q), call('ZCARD', q.name .. '/blocked')}
end

local function is_used(q)
  local u = uses(q)
  return u[1] + u[2] + u[3] + u[4] + u[5] + u[6] > 0
end

-- Deletes the keys of a queue without tasks. If it has settings, these and its counters are kept, except with `all`.
local function remove(q, all)
  local names, fields = {}, {'large', 'idle', 'purging', 'purged', 'check', 'unique', 'tagged', 'dropped3', 'dropped5',
    'dropped6', 'dropped7', 'dropped8'}
  for _, set in ipairs({'b', 'd', 'e', 'dead', 'blocked', 'blocked_on_dead', 'x', 'p', 'o', 'k', 'a', 'm', 'v', 'T', 'u', 'h', 'J', 'K', 'U', 'i', 'I',
    'l', 'l:expired', 'l:cancelled', 'l:discarded', 'l:replaced'}) do
    names[#names + 1] = q.name .. '/' .. set
  end
  for priority = 0, 9 do
    for _, kind in ipairs({'s', 'z', 'r', 'w', 'g'}) do names[#names + 1] = stream_of(q, kind, priority) end
    fields[#fields + 1], fields[#fields + 2] = 's' .. priority, 'r' .. priority
  end
  call('UNLINK', q.name .. '/t', unpack(names)) -- not DEL, which takes long if records were left
  for _, name in ipairs({':due', ':deadlines', ':results', ':forget', ':processing'}) do
    call('ZREM', PARTITION .. name, q.key)
  end
  if all or not call('HGET', q.name, 'version') then
    call('UNLINK', q.name, q.name .. '/n', q.name .. '/f', q.name .. '/W')
    call('ZREM', PARTITION .. ':idle', q.key)
    call('SREM', PARTITION .. ':queues', q.key)
    call('SREM', PARTITION .. ':ready', q.key)
    queues[q.key] = nil -- nothing is saved
  else
    call('HDEL', q.name, unpack(fields))
    q.lanes, q.laned, q.extras, q.due, q.fresh = '', 0, false, math.huge, 0
  end
end

-- Sets the time of the next check whether a queue is idle.
local function check_later(q)
  local sound, settings = pcall(cjson.decode, call('HGET', q.name, 'settings') or '')
  local ttl = sound and type(settings) == 'table' and tonumber(settings.queue_ttl)
  ttl = ttl and ttl > 0 and ttl < 1e9 and ttl * 1000000 or QUEUE_TTL
  call('ZADD', PARTITION .. ':idle', text(now + ttl), q.key)
end

-- Removes queues that were empty at the last check and have had no task since then, so their last sequence number is
-- the same. A queue is empty if it has no task, not even the record of an ended one, and no subscriber. Checks a
-- limited number of queues. Returns how many were removed.
local function remove_idle(limit)
  local removed = 0
  local keys = call('ZRANGEBYSCORE', PARTITION .. ':idle', '-inf', text(now), 'LIMIT', 0, limit)
  for i = 1, #keys do
    local q = queue(keys[i])
    local held = call('EXISTS', q.name .. '/t', q.name .. '/o', q.name .. '/l', q.name .. '/b') > 0
      or call('ZRANGEBYSCORE', q.name .. '/u', text(now), '+inf', 'LIMIT', 0, 1)[1] -- rate limits of tenants
    local mark = call('HGET', q.name, 'idle')
    if held or is_used(q) then
      if mark then call('HDEL', q.name, 'idle') end
    elseif mark == text(q.last) then
      remove(q)
      removed = removed + 1
    else
      call('HSET', q.name, 'idle', text(q.last))
    end
    if queues[q.key] then check_later(q) end
  end
  return removed
end

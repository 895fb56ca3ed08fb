-- Keys whose values have a wrong type are renamed, so that scripts that use them work again.

-- Renames a key. Maintenance logs its name.
local function put_aside(name)
  local short = sub(name, #PARTITION + 2)
  call('RENAME', name, PARTITION .. ':aside:' .. short)
  call('HINCRBY', META, 'anomalies', 1)
  redis.pcall('RPUSH', PARTITION .. ':damaged', '/ ' .. short) -- this list may have a wrong type as well
end

-- Puts keys aside that exist and have another type. Returns whether there was one.
local function check_types(prefix, kind, names)
  local found = false
  for i = 1, #names do
    local name = prefix .. names[i]
    local actual = call('TYPE', name).ok
    if actual ~= kind and actual ~= 'none' then
      put_aside(name)
      found = true
    end
  end
  return found
end

local left = 5000 -- number of keys of tenants and ordering keys that this script may still check

-- Checks some keys that exist per tenant or ordering key.
local function check_some_types(prefix, names)
  left = left - #names
  return check_types(prefix, 'zset', names)
end

-- Checks the keys of a queue: some of those that exist per tenant and ordering key. Returns whether one was put aside.
local function check_queue_types(name, some)
  local found = check_types(name, 'hash', {'', '/t', '/b', '/x', '/p', '/o', '/a', '/T', '/W', '/h', '/K', '/I'})
  found = check_types(name, 'string', {'/n', '/f'}) or found
  found = check_types(name, 'zset', {'/e', '/k', '/d', '/dead', '/blocked', '/blocked_on_dead', '/m', '/u', '/v', '/J', '/U', '/i'}) or found
  found = check_types(name, 'list', {'/l', '/l:expired', '/l:cancelled', '/l:discarded', '/l:replaced'}) or found
  local blocked = call('ZRANDMEMBER', name .. '/blocked', math.max(1, math.min(some, left)))
  left = left - #blocked
  found = check_types(name .. '/w:', 'hash', blocked) or found
  for priority = 0, 9 do
    found = check_types(name, 'stream', {'/s' .. priority, '/r' .. priority}) or found
    found = check_types(name, 'zset', {'/z' .. priority, '/w' .. priority, '/g' .. priority}) or found
    local tenants = call('ZRANDMEMBER', name .. '/w' .. priority, math.max(1, math.min(some, left)))
    found = check_some_types(name .. '/y' .. priority .. ':', tenants) or found
  end
  return check_some_types(name .. '/j:', call('HRANDFIELD', name .. '/h', math.max(1, math.min(some, left)))) or found
end

-- Checks the keys of the partition that no queue has, with those of some consumers and endpoints of slots.
local function check_partition_types(some)
  check_types(PARTITION .. ':', 'zset', {'due', 'deadlines', 'processing', 'results', 'forget', 'idle', 'alive', 'children', 'outbox', 'ends', 'slots:lapses',
    'slots:dates', 'schedules:due', 'schedules:names'})
  check_types(PARTITION .. ':', 'set', {'queues', 'ready'})
  check_types(PARTITION .. ':', 'hash', {'subs', 'lines', 'batches', 'slots', 'slots:jobs', 'slots:notes', 'slots:late', 'slots:documents', 'schedules', 'schedules:specs'})
  check_types(PARTITION .. ':', 'stream', {'journal', 'audit'})
  check_types(PARTITION .. ':', 'list', {'damaged'})
  local tokens = call('ZRANDMEMBER', PARTITION .. ':alive', some)
  check_types(PARTITION .. ':c:', 'hash', tokens)
  check_types(PARTITION .. ':k:', 'set', tokens)
  check_types(PARTITION .. ':o:', 'set', tokens)
  for id = 1, math.min(some, tonumber(call('HGET', PARTITION .. ':slots', 'ids')) or 0) do
    check_types(PARTITION .. ':slots:e:', 'hash', {text(id)})
    check_types(PARTITION .. ':slots:e:', 'zset', {text(id) .. ':u'})
  end
end

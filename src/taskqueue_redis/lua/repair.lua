--@ meta base room queue states record counts streams flow tenants lanes cold kin damage places types
-- Renames keys whose values have a wrong type or length, so that scripts that use them work again, and counts the tasks
-- of their queues again. Called after a script has failed. ARGV: cursor, and those of `meta.lua`. Returns the next
-- cursor, "0" at the end.
lift_refusal()
checked = false

-- Deletes fields that must be whole numbers and are not. Returns whether there was one.
local function check_numbers(name, fields)
  local found, values = false, call('HMGET', name, unpack(fields))
  for i = 1, #fields do
    if values[i] and not string.find(values[i], '^%-?%d+$') then
      call('HDEL', name, fields[i])
      found = true
    end
  end
  return found
end

-- Returns how many tasks are dead letters, scheduled, blocked, expired, cancelled or discarded.
local function ended(q)
  local n = 0
  for _, counter in ipairs({'dead', 'scheduled', 'blocked', 'expired', 'cancelled', 'discarded'}) do n = n + setting(q, counter, 0) end
  return n
end

-- Builds the numbers of a queue from its data. The settings are applied again by maintenance.
local function rebuild_numbers(key)
  local q = queue(key)
  find_lanes(q)
  q.last, q.extras = now, true
  q.sorted = call('EXISTS', q.name .. '/h') == 1 or call('EXISTS', q.name .. '/v') == 1
  for i = 1, #q.lanes do q.sorted = q.sorted or call('EXISTS', q.name .. '/w' .. sub(q.lanes, i, i)) == 1 end
  q.limited = call('EXISTS', q.name .. '/f') == 1 or call('HGET', q.name, 'limits') and true
  q.timed = call('EXISTS', q.name .. '/m') == 1
  q.bound = call('HGET', q.name, 'bound_to') and true or false
  index(q, '/d', ':due')
  recount(q)
  q.fresh = q.waiting - q.back
  q.published = q.waiting + q.in_flight + q.done + ended(q)
end

local function repair_queue(key)
  local name = PARTITION .. ':q:' .. key
  local found = check_queue_types(name, 1000)
  if check_numbers(PARTITION .. ':subs', {key}) then found = true end
  if check_numbers(name, {'dead', 'scheduled', 'blocked', 'expired', 'cancelled', 'discarded', 'retried', 'purged'}) then
    call('HSET', name, 'scheduled', call('ZCARD', name .. '/d'), 'dead', call('ZCARD', name .. '/dead'),
      'blocked', call('ZCARD', name .. '/blocked'))
    found = true
  end
  local flow = call('GET', name .. '/f')
  if flow and #flow ~= FLOW_SIZE then
    put_aside(name .. '/f')
    found = true
  end
  local numbers = call('GET', name .. '/n')
  if numbers and (#numbers < SIZE or not is_sound(numbers, unpack_struct('<d', numbers), unpack_struct('<d', numbers, 105))) then
    put_aside(name .. '/n')
    numbers = false
  end
  if not numbers then
    rebuild_numbers(key)
  elseif found then
    recount(queue(key))
  end
  if found or not numbers then note_damage(queue(key), '/') end
  if queue(key).waiting > 0 then call('SADD', PARTITION .. ':ready', key) end
end

if ARGV[3] == '0' then
  check_partition_types(1000)
  if check_numbers(META, {'anomalies', 'steps', 'step', 'swept', 'armed', 'checked', 'marks', 'line', 'schedules'}) then call('HINCRBY', META, 'anomalies', 1) end
  for _, set in ipairs({'due', 'deadlines', 'processing', 'results', 'forget'}) do
    local keys = call('ZRANGE', PARTITION .. ':' .. set, 0, 999)
    for i = 1, #keys do call('SADD', PARTITION .. ':queues', keys[i]) end
  end
end
local cursor = call('SSCAN', PARTITION .. ':queues', ARGV[3], 'COUNT', 50)
for i = 1, #cursor[2] do repair_queue(cursor[2][i]) end
save_all()
return cursor[1]

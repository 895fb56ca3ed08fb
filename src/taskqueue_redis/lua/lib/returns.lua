-- Taking deliveries back.

-- `verb` is set if the owner settles by its receipt. It is stored, so that the call can be repeated.
local function hand_back(q, id, r, name, fence, body, lost, verb, worker)
  drop_entry(q, name, fence)
  add(q, 'in_flight', -1)
  add(q, 'redelivered', 1)
  land(q, r)
  r.handed = r.attempt
  if verb then r.verb, r.answer, r.settled = verb, 0, r.fence end
  local dead = false
  if lost then
    add(q, 'lost', 1)
    r.losses = r.losses + 1
    local cold = read_cold(q, id)
    fail(cold, r.attempt, 'lost with its consumer')
    dead = r.losses > setting(q, 'max_losses', 5)
    if dead then
      cold.r = 'max_losses_exceeded'
      if verb then r.answer = 1 end
      bury(q, r, id, body, cold)
    end
    write_cold(q, id, cold)
  end
  if not dead then put_back(q, r, id, body) end
  put_down(q, id, r)
  local event = dead and 'dead_lettered' or lost and 'lost' or 'redelivered'
  note(q, event, id, r, dead and 'dead' or 'waiting', worker, nil, dead and 'max_losses_exceeded')
  return dead
end

-- Takes back a limited number of deliveries of a consumer; removes the consumer once it has none.
-- Returns how many were taken back, and whether these were all.
local function take_back(token, lost, budget)
  local taken, owns, worker = 0, PARTITION .. ':o:' .. token, nil
  local lanes = call('SMEMBERS', owns)
  for i = 1, #lanes do
    local kind, priority, key = sub(lanes[i], 1, 1), sub(lanes[i], 2, 2), sub(lanes[i], 3)
    local q = queue(key)
    worker = worker or worker_of(q, token)
    local name = stream_of(q, kind, priority)
    local pending = redis.pcall('XPENDING', name, 'g', '-', '+', budget - taken + 1, token)
    if pending.err then pending = {} end
    for j = 1, math.min(#pending, budget - taken) do
      local fence = sub(pending[j][1], 1, -3)
      local fields = fields_at(name, fence)
      local id = fields and fields[1]
      local packed = id and call('HGET', q.name .. '/t', id)
      call('HDEL', q.name .. '/a', fence)
      if packed then
        hand_back(q, id, read_record(packed), name, fence, fields[2], lost, nil, worker)
      else
        drop_entry(q, name, fence)
        call('HINCRBY', META, 'anomalies', 1)
      end
      taken = taken + 1
    end
    if taken >= budget and #pending > 0 then return taken, false end
    redis.pcall('XGROUP', 'DELCONSUMER', name, 'g', token)
    call('SREM', owns, lanes[i])
  end
  local keys = call('SMEMBERS', PARTITION .. ':k:' .. token)
  for i = 1, #keys do
    if call('HINCRBY', PARTITION .. ':subs', keys[i], -1) <= 0 then call('HDEL', PARTITION .. ':subs', keys[i]) end
  end
  call('DEL', PARTITION .. ':k:' .. token, PARTITION .. ':c:' .. token, owns)
  call('ZREM', PARTITION .. ':alive', token)
  return taken, true
end

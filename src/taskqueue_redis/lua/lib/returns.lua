-- Taking deliveries back.

-- Counts a delivery that was taken back; the counters are written at the end, because there may be many.
local function count_return(q, lost)
  if not q.returns then
    q.returns, q.losses = 0, 0
    at_end[#at_end + 1] = function()
      add(q, 'redelivered', q.returns)
      if q.losses > 0 then add(q, 'lost', q.losses) end
      q.returns = nil
    end
  end
  q.returns = q.returns + 1
  if lost then q.losses = q.losses + 1 end
end

-- `verb` is set if the owner settles with its receipt. It is stored, so that the call can be repeated. `idle`: the milliseconds
-- since the delivery.
local function hand_back(q, id, r, name, fence, body, lost, verb, worker, idle)
  drop_entry(q, name, fence)
  add(q, 'in_flight', -1)
  count_return(q, lost)
  land(q, r)
  r.handed = r.attempt
  if verb then r.verb, r.answer, r.settled = verb, 0, r.fence end
  local dead = false
  if lost then
    r.losses = r.losses + 1
    local cold = read_cold(q, id)
    fail(cold, r.attempt, 'lost with its consumer', nil, worker)
    q.max_losses = q.max_losses or setting(q, 'max_losses', 5)
    dead = r.losses > q.max_losses
    if dead then
      cold.r = 'max_losses_exceeded'
      if verb then r.answer = 1 end
      bury(q, r, id, body, cold, worker, idle)
    end
    write_cold(q, id, cold)
  end
  if not dead then put_back(q, r, id, body) end
  put_down(q, id, r)
  local event = dead and 'dead_lettered' or lost and 'lost' or 'redelivered'
  note(q, event, id, r, dead and 'dead' or 'waiting', worker, nil, dead and 'max_losses_exceeded')
  return dead
end

-- Takes back deliveries of a consumer, and removes the consumer once it has none. The work is limited by a budget,
-- which each delivery, lane and key reduces by one.
-- Returns how many were taken back, what is left of the budget, and whether the consumer was removed.
local function take_back(token, lost, budget)
  local taken, owns, worker = 0, PARTITION .. ':o:' .. token, nil
  local lanes = call('SRANDMEMBER', owns, budget)
  for i = 1, #lanes do
    local kind, priority, key = sub(lanes[i], 1, 1), sub(lanes[i], 2, 2), sub(lanes[i], 3)
    local q = queue(key)
    worker = worker or worker_of(q, token, true)
    local name = stream_of(q, kind, priority)
    local pending = of_group('XPENDING', name, 'g', '-', '+', budget, token) or {}
    for j = 1, #pending do
      local fence = sub(pending[j][1], 1, -3)
      local fields = fields_at(name, fence)
      local id = fields and fields[1]
      local r = id and record_of_entry(q, id, fence)
      if q.extras then call('HDEL', q.name .. '/a', fence) end
      if r then
        hand_back(q, id, r, name, fence, fields[2], lost, nil, worker, pending[j][3])
        bytes = bytes + #fields[2]
      else
        drop_entry(q, name, fence)
        call('HINCRBY', META, 'anomalies', 1)
      end
      taken, budget = taken + 1, budget - 1
      if budget <= 0 or bytes >= BYTES then return taken, budget, false end
    end
    of_group('XGROUP', 'DELCONSUMER', name, 'g', token)
    call('SREM', owns, lanes[i])
    budget = budget - 1
    if budget <= 0 then return taken, budget, false end
  end
  local keys = call('SMEMBERS', PARTITION .. ':k:' .. token)
  for i = 1, #keys do
    if call('HINCRBY', PARTITION .. ':subs', keys[i], -1) <= 0 then call('HDEL', PARTITION .. ':subs', keys[i]) end
  end
  call('DEL', PARTITION .. ':k:' .. token, PARTITION .. ':c:' .. token, owns)
  call('ZREM', PARTITION .. ':alive', token)
  return taken, budget - #keys, true
end

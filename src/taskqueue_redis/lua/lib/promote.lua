-- Makes due tasks available, in the order of their due times: a limited number, and fewer if their bodies are large.

-- Returns how many tasks were processed, and how many of them became available.
local function promote(q, limit)
  local due, n, ended = call('ZRANGEBYSCORE', q.name .. '/d', '-inf', text(now), 'LIMIT', 0, limit), 0, 0
  local upto = #due > 0 and purged_to(q)
  while n < #due and bytes < BYTES do
    n = n + 1
    local id = sub(due[n], 18)
    local r, body = nil, call('HGET', q.name .. '/b', id)
    if not body then
      abandon(q, id)
    else
      r = record_at(q, id, SCHEDULED, PARKED, nil, sub(due[n], 1, 17), body)
    end
    if body and r.seq <= upto then
      ended = ended + 1
      end_live(q, id, r, CANCELLED, 'cancelled')
    else
      if body then
        bytes = bytes + #body
        make_available(q, r, id, body, deadline_of(q, id))
        call('HSET', q.name .. '/t', id, write_record(r))
        if r.place ~= HELD then call('HDEL', q.name .. '/b', id) end
        note(q, 'available', id, r, 'waiting')
      end
      call('ZREM', q.name .. '/d', due[n]) -- last, so that no task is lost if a key is damaged
      add(q, 'scheduled', -1)
    end
  end
  if ended > 0 then call('HINCRBY', q.name, 'purged', ended) end
  if n > 0 then index(q, '/d', ':due') end
  return n, n - ended
end

-- Promotes due tasks, so that they come before the tasks that become available now.
local function promote_first(q)
  if q.due <= now then promote(q, 500) end
end

local function promote_due(limit)
  local looked, promoted = 0, 0
  local keys = call('ZRANGEBYSCORE', PARTITION .. ':due', '-inf', text(now), 'LIMIT', 0, limit)
  for i = 1, #keys do
    local q = queue(keys[i])
    local n, available = promote(q, limit - looked)
    if n == 0 and bytes < BYTES then index(q, '/d', ':due') end
    looked, promoted = looked + n, promoted + available
    if looked >= limit or bytes >= BYTES then break end
  end
  return promoted
end

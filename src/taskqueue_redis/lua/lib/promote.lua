-- Makes due tasks available, in the order of their due times: a limited number, and fewer if their bodies are large.

local function promote(q, limit)
  local due, n = call('ZRANGEBYSCORE', q.name .. '/d', '-inf', text(now), 'LIMIT', 0, limit), 0
  while n < #due and bytes < BYTES do
    n = n + 1
    local id = sub(due[n], 18)
    local r = read_record(call('HGET', q.name .. '/t', id))
    local body = drop_body(q, id)
    bytes = bytes + #body
    call('ZREM', q.name .. '/d', due[n])
    add(q, 'scheduled', -1)
    make_available(q, r, id, body, deadline_of(q, id))
    call('HSET', q.name .. '/t', id, write_record(r))
    note(q, 'available', id, r, 'waiting')
  end
  if n > 0 then index(q, '/d', ':due') end
  return n
end

-- Promotes due tasks, so that they come before the tasks that become available now.
local function promote_first(q)
  if q.due <= now then promote(q, 1000) end
end

local function promote_due(limit)
  local promoted = 0
  local keys = call('ZRANGEBYSCORE', PARTITION .. ':due', '-inf', text(now), 'LIMIT', 0, limit)
  for i = 1, #keys do
    local q = queue(keys[i])
    local n = promote(q, limit - promoted)
    if n == 0 and bytes < BYTES then index(q, '/d', ':due') end
    promoted = promoted + n
    if promoted >= limit or bytes >= BYTES then break end
  end
  return promoted
end

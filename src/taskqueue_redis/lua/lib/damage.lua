-- Task records that are damaged or missing, because a file was truncated or another program has changed them. Such a
-- record is rebuilt from the place where the task's entry was found.

local UNKNOWN = string.rep('\0', 8) -- the digest of a payload that is not known; any payload counts as equal

-- Counts a damaged task. Maintenance logs its name.
local function note_damage(q, id)
  call('HINCRBY', META, 'anomalies', 1)
  if call('RPUSH', PARTITION .. ':damaged', q.key .. ' ' .. id) > 1000 then
    call('LTRIM', PARTITION .. ':damaged', -1000, -1)
  end
end

-- Returns a new record for a task with this body, and stores it. `more`: the counters of an entry in a stream. Without
-- them, the attempt is derived from the retry tokens.
local function rebuilt(q, id, state, place, priority, seq, body, more)
  note_damage(q, id)
  local size, tenant, entity = #body > 3 and string.byte(body, 2) * 256 + string.byte(body, 3) or 0, nil, nil
  if size > 0 then -- the fields of the task that are not at their defaults
    local sound, header = pcall(cmsgpack.unpack, sub(body, 4, 3 + size))
    if sound and type(header) == 'table' then tenant, entity = header.tenant, header.ordering_key end
  end
  local r = new_record(tonumber(priority), UNKNOWN, tenant, entity)
  r.state, r.place, r.seq = state, place, tonumber(seq)
  local attempt, losses, prior = string.match(more or '', '^(%d+):(%d+):(%d+)')
  if attempt then
    r.attempt, r.losses, r.prior = tonumber(attempt), tonumber(losses), tonumber(prior)
  else
    local retried = 0 -- a task has tokens of its last retries only, each with its attempt
    for _, at in pairs(read_cold(q, id).k) do
      retried = retried + 1
      if at ~= true then r.attempt = math.max(r.attempt, at + 1) end
    end
    r.attempt = math.max(r.attempt, retried + 1)
  end
  if place == FRESH or place == AGAIN then
    r.fence = r.seq
    if holder(stream_with(q, r), text(r.fence)) then
      r.handed = r.attempt
      if flow_of(q).epoch > 0 then mark(q, r, 2) end
    end
  end
  call('HSET', q.name .. '/t', id, write_record(r))
  return r
end

-- Returns the record of a task whose entry was found at a place. A record that contradicts the place is rebuilt, because
-- the entry would remain there otherwise. `priority`: nil if the place does not have it. `body`: false if not read.
local function record_at(q, id, state, place, priority, seq, body)
  local r = read_record(call('HGET', q.name .. '/t', id))
  if r and r.state == state and r.place == place and (not priority or r.priority == tonumber(priority))
    and (place > AGAIN or r.fence == tonumber(seq)) and (state ~= SCHEDULED or r.seq == tonumber(seq)) then return r end
  return rebuilt(q, id, state, place, priority or 5, seq, body or call('HGET', q.name .. '/b', id) or '')
end

-- Returns the record of a task from its entry in a stream, found by the sequence number of the entry; nothing if there
-- is no entry, or if another program has written it.
local function rebuilt_in_flight(q, id, fence)
  for i = 1, #q.lanes do
    local priority = sub(q.lanes, i, i)
    for _, kind in ipairs({'s', 'r'}) do
      local fields = fields_at(stream_of(q, kind, priority), fence)
      if fields and fields[1] == id and #fields[2] > 7 and string.byte(fields[2]) == 1 then
        return rebuilt(q, id, WAITING, kind == 's' and FRESH or AGAIN, priority, fence, fields[2], fields[4])
      end
    end
  end
end

-- Deletes a task whose body is lost.
local function abandon(q, id)
  note_damage(q, id)
  call('HDEL', q.name .. '/t', id)
  call('HDEL', q.name .. '/x', id)
  call('ZREM', q.name .. '/e', id)
end

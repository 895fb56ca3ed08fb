-- Task records that are damaged or missing, or that contradict the place of the task's entry, because a file was
-- truncated or another program has changed them. Such a record is rebuilt from the place where the entry was found.

local UNKNOWN = string.rep('\0', 8) -- the digest of a payload that is not known; any payload counts as equal

local noted_damages = 0 -- number of damaged tasks that this script has found

-- Counts a damaged task. Maintenance logs its name.
local function note_damage(q, id)
  noted_damages = noted_damages + 1
  call('HINCRBY', META, 'anomalies', 1)
  if call('RPUSH', PARTITION .. ':damaged', q.key .. ' ' .. id) > 1000 then
    call('LTRIM', PARTITION .. ':damaged', -1000, -1)
  end
end

-- Returns the fields of a task that are not at their defaults.
local function header_of(body)
  local head, size, kind = 4, 0, #body > 5 and string.byte(body, 1)
  if kind == 3 then -- the contents of another task, see `linked_as`
    size = unpack_struct('>I4', body, 2)
    local sound, own = pcall(cmsgpack.unpack, sub(body, 6, 5 + size))
    local header = header_of(sub(body, 6 + size))
    if sound and type(own) == 'table' then header.after, header.batch = own.after, own.batch end
    return header
  elseif kind == 2 then -- a header of more than 65,535 bytes
    head, size = 6, unpack_struct('>I4', body, 2)
  elseif #body > 3 then
    size = unpack_struct('>H', body, 2)
  end
  local sound, header = pcall(cmsgpack.unpack, sub(body, head, head - 1 + size))
  return size > 0 and sound and type(header) == 'table' and header or {}
end

-- Returns a new record for a task with this body, and the task's deadline; neither is stored. `kind` and `more`: the
-- second field of an entry in a stream. Without it, the attempt is derived from the retry tokens and the history.
local function built(q, id, state, place, priority, seq, body, kind, more)
  local about = header_of(body)
  local function named(name) return type(about[name]) == 'string' and about[name] or nil end
  local r = new_record(tonumber(priority), UNKNOWN, named('tenant'), named('ordering_key'))
  r.state, r.place, r.seq = state, place, tonumber(seq)
  local attempt, losses, prior = string.match(more or '', '^(%d+):(%d+):(%d+)')
  if attempt then
    r.attempt, r.losses, r.prior = tonumber(attempt), tonumber(losses), tonumber(prior)
  else
    local cold, retried = read_cold(q, id), 0
    for _, at in pairs(cold.k) do -- only tokens of the last retries are kept, each with its attempt
      retried = retried + 1
      if at ~= true then r.attempt = math.max(r.attempt, at + 1) end
    end
    local last = cold.h[#cold.h]
    r.attempt = math.max(r.attempt, retried + 1, last and last[1] or 1)
  end
  local again = place == AGAIN or state == DEAD or place == PARKED and state == WAITING
  r.handed = again and r.attempt or math.max(r.attempt - 1, kind == 'again' and 1 or 0)
  if place == FRESH or place == AGAIN then r.fence = r.seq end
  r.flags = call('EXISTS', q.name .. '/w:' .. id) * KEPT + call('EXISTS', q.name .. '/E:' .. id) * STREAMS
  if children_of(q.key .. '/' .. id, nil, 1)[1] then r.flags = r.flags + CHILDREN end
  if named('batch') and about.batch ~= q.key .. '/' .. id then r.flags, r.batch = r.flags + MEMBER, about.batch end
  return r, type(about.deadline) == 'number' and floor(about.deadline * 1000000 + 0.5) or nil
end

-- Builds and stores the record of a task.
local function rebuilt(q, id, state, ...)
  note_damage(q, id)
  local r, deadline = built(q, id, state, ...)
  if r.fence > 0 and holder(stream_with(q, r), text(r.fence)) then
    r.handed = r.attempt
    if flow_of(q).epoch > 0 then mark(q, r, 2) end
  end
  if deadline and is_live(r) then note_deadline(q, id, text(deadline)) end
  put_down(q, id, r)
  return r
end

-- Returns the record of a task whose entry was found at a place. A record that contradicts the place is rebuilt, because
-- the entry would remain there otherwise. `priority`: nil if the place does not have it. `body`: false if not read.
local function record_at(q, id, state, place, priority, seq, body)
  local packed = call('HGET', q.name .. '/t', id)
  local r = read_record(packed)
  if r and r.state == state and r.place == place and (not priority or r.priority == tonumber(priority))
    and (place > AGAIN or r.fence == tonumber(seq)) and (state ~= SCHEDULED or r.seq == tonumber(seq)) then return r end
  local kept = packed and string.byte(packed, 3) or 10
  return rebuilt(q, id, state, place, priority or kept < 10 and kept or 5, seq,
    body or call('HGET', q.name .. '/b', id) or '')
end

-- Returns the place of a task's entry in a stream, as arguments of `built`; nothing if there is no entry.
local function entry_of(q, id, fence)
  for i = 1, #q.lanes do
    local priority = sub(q.lanes, i, i)
    for _, kind in ipairs({'s', 'r'}) do
      local fields = fields_at(stream_of(q, kind, priority), fence)
      if fields and fields[1] == id then
        return {WAITING, kind == 's' and FRESH or AGAIN, priority, fence, fields[2], fields[3], fields[4]}
      end
    end
  end
end

-- Returns the record of a task from its entry in a stream, found by the sequence number of the entry; nothing if there
-- is no entry, or if another program has written it. An entry of a task that is elsewhere is deleted.
local function record_of_entry(q, id, fence)
  local at = entry_of(q, id, fence)
  if not at then return end
  local packed = call('HGET', q.name .. '/t', id)
  local r = read_record(packed)
  if r and not is_over(r) and is_there(q, id, r) then
    if text(r.fence) == fence then return r end
    local name = stream_of(q, at[2] == FRESH and 's' or 'r', at[3])
    if holder(name, fence) then add(q, 'in_flight', -1) end
    drop_entry(q, name, fence)
    return note_damage(q, id)
  end
  if packed or #at[5] > 7 and string.byte(at[5]) < 4 then return rebuilt(q, id, unpack(at, 1, 7)) end
end

-- Returns where a task is, as arguments of `built`: found by its id, or by the numbers that are left of its record.
-- Returns nothing if it was not found.
local function place_of(q, id, packed)
  local seq = packed and #packed >= 18 and text(unpack_struct('>I7', packed, 12))
  local fence = packed and #packed >= 25 and text(unpack_struct('>I7', packed, 19))
  local kept, body = packed and string.byte(packed, 3) or 10, call('HGET', q.name .. '/b', id)
  if not body then return fence and entry_of(q, id, fence) or seq and entry_of(q, id, seq) or nil end
  if kept > 9 then kept = 5 end
  local at = call('ZSCORE', q.name .. '/dead', id)
  if at then return {DEAD, PARKED, kept, at, body} end
  at = call('ZSCORE', q.name .. '/blocked', id)
  if at then return {BLOCKED, PARKED, kept, at, body} end
  at = call('ZSCORE', q.name .. '/J', id)
  if at then return {WAITING, HELD, kept, at, body} end
  for i = 1, #q.lanes do
    local priority = sub(q.lanes, i, i)
    at = call('ZSCORE', q.name .. '/z' .. priority, id)
    if at then return {WAITING, PARKED, priority, at, body} end
  end
  if seq and call('ZSCORE', q.name .. '/d', due_member({seq = seq}, id)) then return {SCHEDULED, PARKED, kept, seq, body} end
end

-- Parses the record of a task. A record that is damaged or contradicts the place of the entry is rebuilt. Returns
-- nothing if the entry was not found.
local function found(q, id, packed)
  local r = read_record(packed)
  if r and (is_over(r) or is_there(q, id, r)) then return r end
  local at = place_of(q, id, packed)
  return at and rebuilt(q, id, unpack(at, 1, 7))
end

-- Deletes a task whose body is lost.
local function abandon(q, id)
  local r = read_record(call('HGET', q.name .. '/t', id))
  if r and has(r, MEMBER) then count_member(r.batch, 'f', 1) end
  note_damage(q, id)
  call('HDEL', q.name .. '/t', id)
  call('HDEL', q.name .. '/x', id)
  tags.drop(q, id)
  call('ZREM', q.name .. '/e', id)
  call('UNLINK', q.name .. '/w:' .. id)
  call('ZREM', q.name .. '/blocked_on_dead', id)
  local name = q.key .. '/' .. id
  if children_of(name, nil, 1)[1] then keep_end(name, UNKNOWN_PARENT, next_number()) end
end

-- Publishing of tasks with optional fields, and in queues with limits.

-- Writes something: if this is the script's first write and Redis has no memory left, Redis refuses it and the script
-- ends.
local function be_refused(q) call('SADD', PARTITION .. ':queues', q.key) end

local before = 500 -- number of due tasks that this script may still promote

-- Promotes due tasks, so that they come before the tasks that are published now.
local function promote_before(q)
  be_refused(q)
  if before > 0 then before = before - (promote(q, before)) end
end

-- Checks whether a task is known and still within the deduplication window. Returns 0 if not, -1 for a
-- duplicate, or -2 for a conflict.
local function look_up(q, id, packed, digest)
  local r = found(q, id, packed)
  if not r then return read_record(packed) and 0 or -1 end -- 0: another program has deleted the entry
  if is_over(r) and now >= r.at + q.window then return 0 end
  return (r.digest == digest or r.digest == UNKNOWN) and -1 or -2
end

-- Deletes what is left of an ended or lost task that is published again.
local function make_way(q, id, packed)
  be_refused(q)
  local r = read_record(packed)
  if is_live(r) then
    leave_fresh(q, r)
    release(q, r, id)
  end
  forget_rest(q, id)
end

-- Stores a task that is scheduled, has a deadline, a tenant or an ordering key, or enters sorted lanes. Returns its
-- record.
local function publish_unusual(q, id, digest, priority, body, about)
  local not_before, deadline, tenant, entity = told_of(about)
  local r, state = new_record(tonumber(priority), digest, tenant, entity), 'waiting'
  if deadline == '' then deadline = nil end
  if not_before ~= '' and tonumber(not_before) > now then
    state = 'scheduled'
    if q.sorted then count_fresh(q, r) end
    schedule(q, r, id, body, not_before)
  else
    make_available(q, r, id, body, deadline)
  end
  note(q, 'published', id, r, state, nil, nil, nil, state == 'scheduled' and not_before)
  if deadline then note_deadline(q, id, deadline) end
  return write_record(r)
end

local COPIES = 500 -- number of copies after which further tasks are left to the next call

-- Returns the queues to which a queue is bound; nothing if they are damaged.
local function bound_keys(q)
  local sound, keys = pcall(cjson.decode, call('HGET', q.name, 'bound_to') or '')
  if not sound or type(keys) ~= 'table' or #keys == 0 then return end
  for i = 1, #keys do
    if type(keys[i]) ~= 'string' then return end
  end
  return keys
end

-- Stores a copy of a task in each queue to which its queue is bound, or in none. Returns the answer for the task, and
-- whether further tasks must wait for the next call.
local function publish_copies(bound, id, about, body)
  bound.bound_to = bound.bound_to or bound_keys(bound)
  if not bound.bound_to then -- maintenance applies the settings again
    if not bound.damaged then note_damage(bound, '/') end
    bound.damaged = true
    return 'intake_paused', false
  end
  local keys, lacking, known = bound.bound_to, {}, {}
  bound.copies = (bound.copies or 0) + #keys
  local full = bound.copies >= COPIES
  for i = 1, #keys do
    local q = queue(keys[i])
    if q.due <= now then promote_before(q) end
    local packed = call('HGET', q.name .. '/t', id)
    local answer = packed and look_up(q, id, packed, sub(about, 1, 8)) or 0
    if answer == -2 then return -2, full end
    if answer == 0 then
      local why = q.limited and refusal(q, about)
      if why then return why .. '/' .. q.key, full end
      lacking[#lacking + 1], known[q] = q, packed
    end
  end
  if #lacking == 0 then return -1, full end
  bytes = bytes + #lacking * #body
  local position = lacking[1].waiting
  for i = 1, #lacking do
    local q = lacking[i]
    if known[q] then make_way(q, id, known[q]) end
    local record = publish_unusual(q, id, sub(about, 1, 8), sub(about, 9, 9), body, about)
    call('HSET', q.name .. '/t', id, record)
    q.fresh, q.published, q.copied = q.fresh + 1, q.published + 1, true
  end
  return position, full or bytes >= BYTES
end

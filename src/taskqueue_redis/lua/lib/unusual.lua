-- Publishing of tasks with optional fields, and in queues with limits.

local PARENTS = 1000 -- number of parents after which further tasks are left to the next call

-- Writes something: if this is the script's first write and Redis has no memory left, Redis refuses it and the script
-- ends.
local function be_refused(q) call('SADD', PARTITION .. ':queues', q.key) end

local before = 500 -- number of due tasks that this script may still promote

-- Promotes due tasks, so that they come before the tasks that are published now.
local function promote_before(q)
  be_refused(q)
  if before > 0 then before = before - (promote(q, before)) end
end

-- Returns the rare fields of a published task; nothing if it has none. `u`: its unique key, with the fields `k` (the
-- key), `s` (true if it is given back at the first delivery), `p` (the period), `c` (keep, replace or refuse), `d` and
-- `m` (seconds and maximum of a debounce), and with `replace` `x` (the checksum of the body without the id). Times are
-- in microseconds. `a`: the number of tasks that it waits for, which its header names; `b`: its batch; `t`: its tags.
local function rare_of(about)
  local at = string.find(about, '\n', 10, true)
  return at and cjson.decode(sub(about, at + 1))
end

-- Returns whether publishing a task may change the records of others, or needs its own.
local function is_linked(rare) return rare and (rare.u or rare.a or rare.b) end

-- Returns why a new member of a batch is refused; nothing if it is accepted, or is the batch.
local function refuse_member(q, id, batch)
  return batch ~= q.key .. '/' .. id and count_of(batch).c and 'batch_closed' or nil
end

-- Returns when a task becomes due, by its debounce if it has one. `first`: the time of the first publish.
local function due_of(not_before, u, first)
  if not (u and u.d) then return not_before end
  return text(math.min(now + u.d, u.m and first + u.m or math.huge))
end

-- Checks whether a task is known and still within the deduplication window. Returns 0 if not, -1 for a
-- duplicate, -2 for a conflict, or "replaced:" and the id of the task that has got its contents.
local function look_up(q, id, packed, digest)
  local r = found(q, id, packed)
  if not r then return read_record(packed) and 0 or -1 end -- 0: another program has deleted the entry
  if is_over(r) and now >= r.at + q.window then return 0 end
  if r.digest ~= digest and r.digest ~= UNKNOWN then return -2 end
  return r.state == REPLACED and 'replaced:' .. r.entity or -1
end

-- Deletes what is left of an ended or lost task that is published again.
local function make_way(q, id, packed)
  be_refused(q)
  local r = read_record(packed)
  if is_live(r) then
    leave_fresh(q, r)
    release(q, r, id)
    if r.flags > 0 then note_change(q, r, id, UNKNOWN_PARENT) end
  end
  forget_rest(q, id)
  disclaim(q, id)
end

-- Stores a task that is scheduled, has a deadline, a tenant, an ordering key or rare fields, or enters sorted lanes.
-- Returns its record, which is already written if the task is linked, and whether further tasks must wait for the next
-- call, because of the many parents that were looked at.
local function publish_unusual(q, id, digest, priority, body, about)
  local not_before, deadline, tenant, entity = told_of(about)
  local r, state = new_record(tonumber(priority), digest, tenant, entity), 'waiting'
  local rare = rare_of(about)
  if rare then not_before = due_of(not_before, rare.u, now) end
  if deadline == '' then deadline = nil end
  if deadline then note_deadline(q, id, deadline) end
  local batch, reason, due = rare and rare.b == q.key .. '/' .. id, nil, nil
  if rare and rare.b and not batch then
    r.flags, r.batch = MEMBER, rare.b
    count_member(r.batch, 'a', 1)
  end
  if rare and rare.a or batch then
    q.fresh = q.fresh - 1
    state, reason = waiting().admit(q, r, id, body, tonumber(not_before))
    due = not_before
  elseif not_before ~= '' and tonumber(not_before) > now then
    state = 'scheduled'
    if q.sorted then count_fresh(q, r) end
    schedule(q, r, id, body, not_before)
  else
    make_available(q, r, id, body, deadline)
  end
  if reason then -- it is blocked first
    note(q, 'published', id, r, 'blocked', nil, nil, nil, due)
    note(q, state == 'dead' and 'dead_lettered' or state, id, r, state, nil, nil, reason)
  else
    note(q, 'published', id, r, state, nil, nil, nil, (state == 'scheduled' or state == 'blocked') and not_before)
  end
  if is_linked(rare) then put_down(q, id, r) end
  if rare then
    if rare.u then claim(q, id, rare.u, now) end
    if rare.t then tags.put(q, id, rare.t) end
  end
  return write_record(r), waits ~= nil and (waits.looked or 0) >= PARENTS
end

-- Ends of tasks. The record of an ended task is kept for the queue's deduplication window, and longer if its result is, or
-- if the queue has `keep_ended`.

local function remember(q, id, state)
  if call('RPUSH', q.name .. LISTS[state], text(now) .. ':' .. id) == 1 then
    call('ZADD', PARTITION .. ':forget', 'LT', text(now + q.window), q.key)
  end
end

-- Returns what follows the numbers in the record of a task that ended: its tenant, and if the queue keeps ended tasks,
-- the time of the last delivery and the worker.
local function tail_of(q, tenant, since, worker)
  local kept = q.keeps and worker and text(since or 0) .. '/' .. worker or ''
  return tenant == '' and kept == '' and '' or '\0\0\0' .. tenant .. '/' .. kept
end

-- Returns the worker of the consumer that has an entry in flight. The one in its receipt is perhaps gone, see `adopt.lua`.
local function worker_at(q, name, fence) return worker_of(q, (holder(name, fence))) end

-- The same as `tail_of` for a delivery that is acknowledged. `packed`: the record before.
local function acked_tail(q, packed, name, fence, worker)
  local tenant, _, idle = #packed > RECORD_SIZE and string.match(packed, '^[^/]*', RECORD_SIZE + 4) or '', nil, nil
  if q.keeps then _, idle = holder(name, fence) end
  return tail_of(q, tenant, idle and now - idle * 1000, worker)
end

-- Releases the ordering key of a task that has ended or become a dead letter, and makes the next task with the key
-- available.
local function release(q, r, id)
  if r.entity == '' or call('HGET', q.name .. '/h', r.entity) ~= id then return unsort(q) end
  local heir, seq = unpack(call('ZPOPMIN', q.name .. '/j:' .. r.entity))
  if not heir then
    call('HDEL', q.name .. '/h', r.entity)
    return unsort(q)
  end
  call('ZREM', q.name .. '/J', heir)
  q.held = q.held - 1
  call('HSET', q.name .. '/h', r.entity, heir)
  local body = drop_body(q, heir)
  if not body then
    abandon(q, heir)
    add(q, 'waiting', -1)
    return release(q, r, heir)
  end
  local h = record_at(q, heir, WAITING, HELD, nil, seq, body)
  h.entity, h.place, h.fence = r.entity, FRESH, next_seq(q)
  bytes = bytes + math.max(#body, 8192) -- at least 8192, because the commands take time as well
  enter_stream(q, h, heir, body, deadline_of(q, heir))
  enter_lane(q, h)
  call('HSET', q.name .. '/t', heir, write_record(h))
  q.ring = true
end

-- Updates tenants and ordering keys for deliveries that were executed. `ended`: alternately the id and the previous
-- record of a task.
local function settle_sorted(q, ended)
  local landed, tenants = {}, {}
  for i = 1, #ended, 2 do
    local packed, r = ended[i + 1], {}
    r.marks = unpack_struct('>H', packed, RECORD_SIZE + 1)
    r.tenant, r.entity = string.match(packed, '^([^/]*)/([^/]*)', RECORD_SIZE + 4)
    if marks_of(q, r) == 2 then
      if not landed[r.tenant] then tenants[#tenants + 1] = r.tenant end
      landed[r.tenant] = (landed[r.tenant] or 0) + 1
    end
    if r.entity ~= '' then release(q, r, ended[i]) end
  end
  if #tenants > 0 then read_tenants(q, tenants) end
  for i = 1, #tenants do
    note_tenant(q, tenants[i], 0, -landed[tenants[i]])
    if flow_of(q).tenant_inflight > 0 then wake_tenant(q, tenants[i]) end
  end
  unsort(q)
end

-- Notes a new state of a task that has flags: for those that wait for it, and in the counts of its batch. `r`: the record
-- with the state before. `alive`: the state of a dead letter that is live again, as JSON.
local function note_change(q, r, id, state, result, alive)
  if has(r, STREAMS) then streamed().change(q, id, state, alive) end
  if has(r, CHILDREN) then changed_parents[#changed_parents + 1] = {q.key .. '/' .. id, state, result} end
  if has(r, MEMBER) then
    if r.state == DEAD then count_member(r.batch, 'x', -1) end
    if not stays(state) then count_member(r.batch, state == DONE and 'd' or 'f', 1) end
    if state == DEAD then count_member(r.batch, 'x', 1) end
  end
  if not has(r, KEPT) or stays(state) then return end
  local name = q.name .. '/w:' .. id
  local s = r.state == BLOCKED and unpack_wait(call('HGET', name, 'state'))
  if s and s.b and not s.o then add_line('close', q.key .. '/' .. id, '-', {}) end -- no more members are added
  call('UNLINK', name)
end

-- Ends a task whose entry was already removed from where it was stored.
local function finish(q, r, id, state, counter, worker, since)
  if r.flags > 0 then note_change(q, r, id, state) end
  r.state, r.place, r.fence, r.at = state, NOWHERE, 0, now
  add(q, counter, 1)
  if call('ZREM', q.name .. '/e', id) == 1 then index(q, '/e', ':deadlines') end
  remember(q, id, state)
  release(q, r, id)
  r.entity, r.batch, r.flags = '', '', 0
  if q.keeps and worker then r.entity, r.batch = text(since), worker end
end

-- Deletes what is stored in addition to the record of an ended task.
local function forget_rest(q, id)
  call('HDEL', q.name .. '/x', id)
  call('HDEL', q.name .. '/p', id)
  tags.drop(q, id)
  if call('HDEL', q.name .. '/o', id) == 1 then
    call('ZREM', q.name .. '/k', id)
    index(q, '/k', ':results')
  end
end

-- Makes a task a dead letter. `worker` and `idle`: of the delivery that ended so, if there was one, and the milliseconds since
-- then. The caller writes the cold fields.
local function bury(q, r, id, body, cold, worker, idle)
  cold.w, cold.s = worker or '', idle and now - idle * 1000
  local deadline = call('ZSCORE', q.name .. '/e', id)
  if deadline then
    cold.d = deadline
    call('ZREM', q.name .. '/e', id)
    index(q, '/e', ':deadlines')
  end
  if r.flags > 0 then note_change(q, r, id, DEAD) end
  r.state, r.place, r.fence, r.at = DEAD, PARKED, 0, now
  call('HSET', q.name .. '/b', id, body)
  call('ZADD', q.name .. '/dead', text(next_seq(q)), id)
  add(q, 'dead', 1)
  release(q, r, id)
end

-- Ends a live task, whatever its state. If it is in flight, its consumer is notified.
local function end_live(q, id, r, state, counter, reason)
  local fence = text(r.fence)
  local _, owner, since = withdraw(q, r, id, true)
  if owner then revoke(owner, q, fence) end
  local worker = worker_of(q, owner)
  finish(q, r, id, state, counter, worker, since)
  put_down(q, id, r)
  note(q, counter, id, r, counter, worker, nil, reason)
end

-- Ends of tasks. The record of an ended task is kept for the queue's deduplication window, and longer if its result is.

local function remember(q, id, at)
  if call('RPUSH', q.name .. '/l', text(at) .. ':' .. id) == 1 then
    call('ZADD', PARTITION .. ':forget', text(at + q.window), q.key)
  end
end

-- Ends a task whose entry was already removed from where it was stored.
local function finish(q, r, id, state, counter)
  r.state, r.place, r.fence, r.at = state, NOWHERE, 0, now
  add(q, counter, 1)
  if call('ZREM', q.name .. '/e', id) == 1 then index(q, '/e', ':deadlines') end
  remember(q, id, now)
  release(q, r, id)
  r.tenant, r.entity = '', ''
end

-- Deletes what is stored in addition to the record of an ended task.
local function forget_rest(q, id)
  call('HDEL', q.name .. '/x', id)
  call('HDEL', q.name .. '/p', id)
  if call('HDEL', q.name .. '/o', id) == 1 then
    call('ZREM', q.name .. '/k', id)
    index(q, '/k', ':results')
  end
end

local function put_down(q, id, r) call('HSET', q.name .. '/t', id, write_record(r)) end

local function bury(q, r, id, body, cold)
  local deadline = call('ZSCORE', q.name .. '/e', id)
  if deadline then
    cold.d = deadline
    call('ZREM', q.name .. '/e', id)
    index(q, '/e', ':deadlines')
  end
  r.state, r.place, r.fence, r.at = DEAD, PARKED, 0, now
  call('HSET', q.name .. '/b', id, body)
  call('ZADD', q.name .. '/dead', text(next_seq(q)), id)
  add(q, 'dead', 1)
  release(q, r, id)
end

-- Removes a task from the dead letters. Returns its body and its deadline.
local function unearth(q, id, cold)
  local body, deadline = call('HGET', q.name .. '/b', id), cold.d
  call('HDEL', q.name .. '/b', id)
  call('ZREM', q.name .. '/dead', id)
  add(q, 'dead', -1)
  cold.d = nil
  return body, deadline
end

local function note_deadline(q, id, deadline)
  q.extras = true
  call('ZADD', q.name .. '/e', deadline, id)
  index(q, '/e', ':deadlines')
end

-- Ends a live task, whatever its state. If it is in flight, its consumer is notified.
local function end_live(q, id, r, state, counter)
  local fence = text(r.fence)
  local _, owner = withdraw(q, r, id, true)
  if owner then revoke(owner, q, fence) end
  finish(q, r, id, state, counter)
  put_down(q, id, r)
  note(q, counter, id, r, counter, worker_of(q, owner))
end

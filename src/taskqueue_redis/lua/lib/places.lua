-- Storing, moving and removing the entries of live tasks.

-- Adds an entry at the end of its lane.
local function make_available(q, r, id, body, deadline)
  use_lane(q, r.priority)
  r.state, r.seq, r.at = WAITING, next_seq(q), now
  if r.entity ~= '' then q.sorted = true end
  if q.sorted then
    enter_sorted(q, r, id, body, deadline)
  else
    uncount_fresh(q, r)
    r.place, r.fence = FRESH, r.seq
    enter_stream(q, r, id, body, deadline)
  end
  add(q, 'waiting', 1)
  q.ring = true
end

-- Adds an entry at its old position, before the entries that were never delivered.
local function put_back(q, r, id, body)
  r.state, r.at = WAITING, now
  if q.sorted then
    enter_sorted(q, r, id, body, deadline_of(q, id), true)
  else
    call('HSET', q.name .. '/b', id, body)
    call('ZADD', q.name .. '/z' .. r.priority, text(r.seq), id)
    r.place, r.fence = PARKED, 0
    add(q, 'back', 1)
  end
  add(q, 'waiting', 1)
  q.ring = true
end

local function schedule(q, r, id, body, at)
  r.state, r.place, r.seq, r.fence, r.at = SCHEDULED, PARKED, next_seq(q), 0, now
  call('HSET', q.name .. '/b', id, body)
  call('ZADD', q.name .. '/d', at, due_member(r, id))
  add(q, 'scheduled', 1)
  if tonumber(at) < q.due then
    q.due = tonumber(at)
    call('ZADD', PARTITION .. ':due', at, q.key)
    redis.pcall('PUBLISH', PARTITION .. ':bell:', at)
  end
end

-- Removes a task from the dead letters. Returns its body and its deadline.
local function unearth(q, id, cold)
  local body, deadline = call('HGET', q.name .. '/b', id), cold.d
  call('HDEL', q.name .. '/b', id)
  call('ZREM', q.name .. '/dead', id)
  add(q, 'dead', -1)
  cold.d, cold.w, cold.s = nil, nil, nil
  return body, deadline
end

local function revoke(token, q, fence)
  local process = string.match(token, '^(.-)%-')
  redis.pcall('PUBLISH', PARTITION .. ':process:' .. process, token .. ' ' .. fence .. ' ' .. q.key)
end

-- Removes a live entry from where it is stored. Returns its body, unless the caller does not need it, and the token of
-- its owner and the time of the delivery if it was in flight.
local function withdraw(q, r, id, unread)
  local body, owner, idle
  if r.state == SCHEDULED then
    call('ZREM', q.name .. '/d', due_member(r, id))
    index(q, '/d', ':due')
    body = drop_body(q, id, unread)
    add(q, 'scheduled', -1)
  elseif r.state == BLOCKED then
    call('ZREM', q.name .. '/blocked', id)
    call('ZREM', q.name .. '/blocked_on_dead', id)
    body = drop_body(q, id, unread)
    add(q, 'blocked', -1)
  elseif r.place == HELD then
    leave_held(q, r, id)
    body = drop_body(q, id, unread)
    add(q, 'waiting', -1)
  elseif r.place == PARKED then
    call('ZREM', q.name .. '/z' .. r.priority, id)
    body = drop_body(q, id, unread)
    add(q, 'waiting', -1)
    add(q, 'back', -1)
  else
    local name, fence = stream_with(q, r), text(r.fence)
    body = not unread and body_at(name, fence)
    owner, idle = holder(name, fence)
    drop_entry(q, name, fence)
    call('HDEL', q.name .. '/a', fence)
    if owner then
      r.handed = r.attempt
      land(q, r)
    elseif q.sorted then
      leave_lane(q, r)
    end
    add(q, owner and 'in_flight' or 'waiting', -1)
  end
  if not owner then leave_fresh(q, r) end
  r.place, r.fence = NOWHERE, 0
  return body, owner, idle and now - idle * 1000
end

-- Counts the entries of a queue again, and corrects its counters if another program has changed the data. Missing
-- entries then show as an imbalance of the ledger.
local function recount(q)
  find_lanes(q)
  local plain, back, in_flight, laned, counted = 0, 0, 0, 0, 0
  for i = 1, #q.lanes do
    local priority = sub(q.lanes, i, i)
    back = back + call('ZCARD', q.name .. '/z' .. priority)
    local tenants = q.sorted and counted <= 1000 and call('ZRANGE', q.name .. '/w' .. priority, 0, 1000) or {}
    counted = counted + #tenants
    for j = 1, #tenants do laned = laned + call('ZCARD', lane_of(q, priority, tenants[j])) end
    for _, kind in ipairs({'s', 'r'}) do
      local name = stream_of(q, kind, priority)
      local pending = of_group('XPENDING', name, 'g')
      local held = pending and tonumber(pending[1]) or 0
      local rest = call('XLEN', name) - held
      in_flight = in_flight + held
      if kind == 's' or q.sorted then plain = plain + rest else back = back + rest end
    end
  end
  if counted > 1000 then laned = q.laned end
  local held = q.sorted and call('ZCARD', q.name .. '/J') or 0
  local waiting = math.max(plain, laned) + back + held
  local right = q.waiting == waiting and q.back == back and q.in_flight == in_flight and q.laned == laned and q.held == held
  for counter, set in pairs({scheduled = '/d', dead = '/dead', blocked = '/blocked'}) do
    local number = call('ZCARD', q.name .. set)
    if setting(q, counter, 0) ~= number then
      call('HSET', q.name, counter, number)
      right = false
    end
  end
  if right then return end
  q.waiting, q.back, q.in_flight, q.laned, q.held = waiting, back, in_flight, laned, held
  q.fresh = math.min(q.fresh, waiting - back + setting(q, 'scheduled', 0) + setting(q, 'blocked', 0))
  q.before, q.ring = q.waiting > held and 0 or 1, true -- the set `ready` may be wrong as well
  call('HINCRBY', META, 'anomalies', 1)
end

-- Where the body of a live task is, and moving it from place to place.
-- An entry of a stream has the task's id as its first field and the body as its value; one that has a deadline has a second
-- field `more`, one that was handed out before `again`: attempt, losses, attempts before the last redrive, deadline.
-- The sequence is the first part of an entry's id, and fences receipts.

local function enter_stream(q, kind, r, id, body, deadline)
  local name = stream_of(q, kind, r.priority)
  local more = ''
  if is_fresh(r) and not deadline then
    call('XADD', name, text(r.fence), id, body)
  else
    more = r.attempt .. ':' .. r.losses .. ':' .. r.prior .. ':' .. (deadline or '')
    call('XADD', name, text(r.fence), id, body, is_fresh(r) and 'more' or 'again', more)
  end
  return name, more
end

-- At the end of its lane.
local function make_available(q, r, id, body, deadline)
  use_lane(q, r.priority)
  r.state, r.seq, r.at = WAITING, next_seq(q), now
  if r.entity ~= '' then q.sorted = true end
  if q.sorted then
    call('HSET', q.name .. '/b', id, body)
    enter_sorted(q, r, id)
  else
    uncount_fresh(q, r)
    r.place, r.fence = FRESH, r.seq
    enter_stream(q, 's', r, id, body, deadline)
  end
  add(q, 'waiting', 1)
  q.ring = true
end

-- At its old place, ahead of what has not been delivered yet.
local function put_back(q, r, id, body)
  call('HSET', q.name .. '/b', id, body)
  r.state, r.at = WAITING, now
  if q.sorted then
    enter_sorted(q, r, id, true)
  else
    call('ZADD', q.name .. '/z' .. r.priority, text(r.seq), id)
    r.place, r.fence = PARKED, 0
    add(q, 'back', 1)
  end
  add(q, 'waiting', 1)
  q.ring = true
end

local function due_member(r, id) return string.format('%017d', r.seq) .. id end

local function schedule(q, r, id, body, at)
  r.state, r.place, r.seq, r.fence, r.at = SCHEDULED, PARKED, next_seq(q), 0, now
  call('HSET', q.name .. '/b', id, body)
  call('ZADD', q.name .. '/d', at, due_member(r, id))
  add(q, 'scheduled', 1)
  if tonumber(at) < q.due then
    q.due = tonumber(at)
    call('ZADD', PARTITION .. ':due', at, q.key)
    call('PUBLISH', PARTITION .. ':bell:', at)
  end
end

local function body_at(name, fence)
  local entry = call('XRANGE', name, fence, fence)[1]
  return entry and entry[2][2]
end

-- From where on the entries of a stream were never handed out, as XRANGE takes it.
local function last_delivered(name)
  local group = redis.pcall('XINFO', 'GROUPS', name)
  if group.err or not group[1] then return '-' end
  for i = 1, #group[1], 2 do
    if group[1][i] == 'last-delivered-id' then return '(' .. group[1][i + 1] end
  end
end

-- Whether an entry that should lie in a stream is gone, as by a foreign hand.
local function is_lost(q, r)
  if r.state ~= WAITING or (r.place ~= FRESH and r.place ~= AGAIN) then return false end
  return not body_at(stream_of(q, r.place == AGAIN and 'r' or 's', r.priority), text(r.fence))
end

-- Who has an entry of a stream in flight, and for how many milliseconds; nothing if nobody has.
local function holder(name, fence)
  local entry = redis.pcall('XPENDING', name, 'g', fence, fence, 1)
  if not entry.err and entry[1] then return entry[1][2], entry[1][3] end
end

-- Takes an entry out of its stream.
local function drop_entry(q, name, fence)
  call('XACK', name, 'g', fence)
  call('XDEL', name, fence)
  if q.timed then call('ZREM', q.name .. '/m', sub(name, -2) .. fence) end
end

local function drop_body(q, id)
  local body = call('HGET', q.name .. '/b', id)
  call('HDEL', q.name .. '/b', id)
  return body
end

local function revoke(token, q, fence)
  local process = string.match(token, '^(.-)%-')
  call('PUBLISH', PARTITION .. ':process:' .. process, token .. ' ' .. fence .. ' ' .. q.key)
end

-- Takes a live entry from wherever it is. Answers its body, and the token of its owner where it was in flight.
local function withdraw(q, r, id)
  local body, owner
  if r.state == SCHEDULED then
    call('ZREM', q.name .. '/d', due_member(r, id))
    index(q, '/d', ':due')
    body = drop_body(q, id)
    add(q, 'scheduled', -1)
  elseif r.place == LANED or r.place == HELD then
    leave_sorted(q, r, id)
    body = drop_body(q, id)
    add(q, 'waiting', -1)
  elseif r.place == PARKED then
    call('ZREM', q.name .. '/z' .. r.priority, id)
    body = drop_body(q, id)
    add(q, 'waiting', -1)
    add(q, 'back', -1)
  else
    local name, fence = stream_of(q, r.place == AGAIN and 'r' or 's', r.priority), text(r.fence)
    body, owner = body_at(name, fence), holder(name, fence)
    drop_entry(q, name, fence)
    call('HDEL', q.name .. '/a', fence)
    if owner then
      r.handed = r.attempt
      land(q, r)
    end
    add(q, owner and 'in_flight' or 'waiting', -1)
  end
  if not owner then leave_fresh(q, r) end
  r.place, r.fence = NOWHERE, 0
  return body, owner
end

-- Counts anew what lies in a queue, where a counter and the structures differ: a foreign hand was here.
-- What is missing then shows as the ledger's imbalance.
local function recount(q)
  local fresh, back, in_flight, laned, many = 0, 0, 0, 0, false
  for i = 1, #q.lanes do
    local priority = sub(q.lanes, i, i)
    back = back + call('ZCARD', q.name .. '/z' .. priority)
    local tenants = q.sorted and call('ZRANGE', q.name .. '/w' .. priority, 0, 1000) or {}
    many = many or #tenants > 1000
    for j = 1, #tenants do laned = laned + call('ZCARD', lane_of(q, priority, tenants[j])) end
    for _, kind in ipairs({'s', 'r'}) do
      local name = stream_of(q, kind, priority)
      local pending = redis.pcall('XPENDING', name, 'g')
      local held = not pending.err and tonumber(pending[1]) or 0
      local rest = call('XLEN', name) - held
      in_flight = in_flight + held
      if kind == 's' then fresh = fresh + rest else back = back + rest end
    end
  end
  if many then laned = q.laned end
  local held = q.sorted and call('ZCARD', q.name .. '/J') or 0
  local sorted = laned + held
  if q.waiting == fresh + back + sorted and q.back == back and q.in_flight == in_flight and q.held == held then return end
  q.waiting, q.back, q.in_flight, q.laned, q.held = fresh + back + sorted, back, in_flight, laned, held
  q.fresh = math.min(q.fresh, fresh + sorted + setting(q, 'scheduled', 0))
  q.before, q.ring = q.waiting > held and 0 or 1, true -- what `ready` says is as doubtful
  call('HINCRBY', META, 'anomalies', 1)
end

-- The slot pool. The hash POOL has the epoch of the pool, its secret ('key'), the last fence and the last id of an
-- endpoint. Its other fields: 'n' and the name of an endpoint: the endpoint's id; 'm' and a model: the ids of the
-- model's endpoints; 's' and a server: the server's limit on jobs, the model that it ran last, and the ids of its
-- endpoints.
-- Each endpoint is a hash: 'h' has the fields of HOT with its model and server, 'u' its URL; the other fields are its
-- leases by fence.
local POOL = PARTITION .. ':slots'
local JOBS, LAPSES = POOL .. ':jobs', POOL .. ':lapses'
local NOTES, LATE, DATES = POOL .. ':notes', POOL .. ':late', POOL .. ':dates'
local UNASSIGNED, ASSIGNED, DETACHED = 0, 1, 2
local HOT = '<BBBBddddddddds'
local LEASE = '<BBBBddddc32s'
local match = string.match
local places, servers, freed = {}, {}, {}
local SWEPT, HOUR, LATE_OF_JOB, LATE_NOTES, LATE_BYTES = 500, 3600000000, 8, 1000, 16777216

-- Combines two names unambiguously, by storing the length of the first.
local function named(first, second) return #first .. ':' .. first .. second end

local function yes(flag) return flag and 1 or 0 end

local EPOCH, fence, counted -- `counted`: whether the last fence has changed
do
  local told = call('HMGET', POOL, 'epoch', 'fence')
  EPOCH, fence = told[1], tonumber(told[2])
end

-- Creates the pool if it does not exist. Fences begin with the current time, so that they are higher than those of a
-- lost pool.
local function demand_pool()
  if EPOCH and fence then return end
  local time = call('TIME')
  EPOCH = sub(redis.sha1hex(ARGV[1] .. time[1] .. '.' .. time[2]), 1, 16)
  fence = math.max(now, time[1] * 1000000 + time[2])
  call('DEL', POOL, JOBS, LAPSES, NOTES)
  call('HSET', POOL, 'epoch', EPOCH, 'fence', text(fence), 'ids', 0)
end

local function next_fence()
  fence, counted = fence + 1, true
  return text(fence)
end

-- Returns a secret that cannot be guessed without the seed. The same seed gives the same secret, so that a call can be
-- repeated.
local function secret_of(seed, fence_text) return sub(redis.sha1hex(seed .. ':' .. fence_text), 1, 32) end

local function place(id)
  if places[id] ~= nil then return places[id] end
  local name = POOL .. ':e:' .. id
  local packed, p = call('HGET', name, 'h'), false
  if packed then
    local reports, well, draining, removed, slots, priority, together, rests, surplus, surplus_at, unassigned, assigned,
      detached, model, at = unpack_struct(HOT, packed)
    p = {
      id = id, name = name, reports = reports == 1, well = well == 1, draining = draining == 1, removed = removed == 1,
      slots = slots, priority = priority, together = together, rests = rests, surplus = surplus, surplus_at = surplus_at,
      unassigned = unassigned, assigned = assigned, detached = detached, model = model, server = sub(packed, at),
    }
  end
  places[id] = p
  return p
end

local function hot(p)
  return pack(HOT, yes(p.reports), yes(p.well), yes(p.draining), yes(p.removed), p.slots, p.priority, p.together, p.rests,
    p.surplus, p.surplus_at, p.unassigned, p.assigned, p.detached, p.model) .. p.server
end

local function place_of(model, server)
  local id = call('HGET', POOL, 'n' .. named(model, server))
  return id and place(id) or nil
end

local function ids_of(model)
  local packed = call('HGET', POOL, 'm' .. model)
  return packed and cmsgpack.unpack(packed) or {}
end

local function read_server(packed)
  local together, last, at = unpack_struct('<ds', packed)
  return together, last, sub(packed, at)
end

-- Reads what the endpoints of a server share. The ids of the endpoints are decoded on demand.
local function server_of(name)
  local s = servers[name]
  if not s then
    local packed = call('HGET', POOL, 's' .. name)
    s = {together = 0, last = '', packed = '\144'}
    if packed then s.together, s.last, s.packed = read_server(packed) end
    servers[name] = s
  end
  return s
end

local function ids_at(s)
  s.ids = s.ids or cmsgpack.unpack(s.packed)
  return s.ids
end

local function save_server(name)
  local s = servers[name]
  call('HSET', POOL, 's' .. name, pack('<ds', s.together, s.last) .. cmsgpack.pack(ids_at(s)))
end

-- Records the model of an endpoint as the last model of its server.
local function note_model(p)
  local s = server_of(p.server)
  if s.last == p.model then return end
  s.last = p.model
  save_server(p.server)
end

local function held(p) return p.unassigned + p.assigned + p.detached end

-- Returns how many further jobs a server may be given.
local function room_of(s)
  if s.together == 0 then return math.huge end
  local all = 0
  local ids = ids_at(s)
  for i = 1, #ids do
    local p = place(ids[i])
    if p then all = all + held(p) end
  end
  return s.together - all
end

local function may_give(p)
  return (p.well or not p.reports) and not p.draining and not p.removed and p.rests <= now
end

-- Leases

local function lease_at(p, fence_text)
  local packed = call('HGET', p.name, fence_text)
  if not packed then return end
  local state, switched, resumed, noted, expires, since, missed, missed_at, secret, holder, at = unpack_struct(LEASE, packed)
  return {
    fence = fence_text, state = state, switched = switched == 1, resumed = resumed == 1, noted = noted == 1, expires = expires,
    since = since, missed = missed, missed_at = missed_at, secret = secret, holder = holder, job = sub(packed, at),
  }
end

-- Stores a lease, and returns its packed form.
local function keep(p, l)
  local packed = pack(LEASE, l.state, yes(l.switched), yes(l.resumed), yes(l.noted), l.expires, l.since, l.missed, l.missed_at,
    l.secret, l.holder) .. l.job
  call('HSET', p.name, l.fence, packed)
  return packed
end

local function ends_by_time(p, l) return l.job == '' or not p.reports end

local function count(p, state, n)
  local counter = state == UNASSIGNED and 'unassigned' or state == ASSIGNED and 'assigned' or 'detached'
  p[counter], p.changed = p[counter] + n, true
end

-- Stores the time at which a lease ends, if it ends by time.
local function date(p, l)
  if ends_by_time(p, l) then call('ZADD', LAPSES, text(l.expires), p.id .. ':' .. l.fence) end
end

local function undate(p, l) call('ZREM', LAPSES, p.id .. ':' .. l.fence) end

local function set_state(p, l, state)
  if l.state == state then return end
  count(p, l.state, -1)
  count(p, state, 1)
  l.state = state
end

-- Creates a lease that is not bound to a job.
local function give(p, s, holder, ttl, seed)
  local number = next_fence()
  local l = {
    fence = number, state = UNASSIGNED, switched = s.last ~= '' and s.last ~= p.model, resumed = false, noted = false,
    expires = now + ttl, since = now, missed = -1, missed_at = 0, secret = secret_of(seed, number), holder = holder, job = '',
  }
  keep(p, l)
  count(p, UNASSIGNED, 1)
  call('ZADD', p.name .. ':u', text(now), number)
  date(p, l)
  return l
end

-- Splits a token into the epoch, the fence, and the random part, which consists of the endpoint's id and the secret.
local function parts_of(token) return match(token, '^(%w+)%.(%d+)%.(%w+)$') end

-- Returns the endpoint and the lease of a token; nothing if the token is stale.
local function current(token)
  local epoch, number, random = parts_of(token)
  local id, secret = match(random or '', '^(%d+)x(%x+)$')
  if not id or epoch ~= EPOCH then return end
  local p = place(id)
  local l = p and lease_at(p, number)
  if not l or l.secret ~= secret or (ends_by_time(p, l) and l.expires <= now) then return end
  return p, l
end

-- Returns the endpoint and the lease of a job, if it has one.
local function lease_of(model, job)
  local at = call('HGET', JOBS, named(model, job))
  local id, number = match(at or '', '^(%d+):(%d+)$')
  local p = id and place(id)
  local l = p and lease_at(p, number)
  if not l or l.job ~= job or (ends_by_time(p, l) and l.expires <= now) then return end
  return p, l
end

local function note_of(p, l) return l.noted and call('HGET', NOTES, named(p.model, l.job)) end

-- Returns a lease in the form that its holder gets.
local function told(p, l, packed)
  p.url = p.url or call('HGET', p.name, 'u')
  return {p.id, l.fence, p.server, p.url, packed, note_of(p, l)}
end

-- Late notes: LATE has the notes by number, and a list of members of DATES per job. DATES has a member per note, by
-- time.

local function drop_late(member)
  local number, size, key = match(member, '^(%d+):(%d+):(.*)$')
  call('ZREM', DATES, member)
  call('HDEL', LATE, number)
  call('HINCRBY', LATE, 'bytes', -size)
  local packed, left = call('HGET', LATE, 'j' .. key), {}
  local members = packed and cmsgpack.unpack(packed) or {}
  for i = 1, #members do
    if members[i][1] ~= member then left[#left + 1] = members[i] end
  end
  if #left > 0 then call('HSET', LATE, 'j' .. key, cmsgpack.pack(left)) else call('HDEL', LATE, 'j' .. key) end
end

-- Returns the numbers of the late notes of a job, the oldest first.
local function late_of(model, job)
  local packed, numbers = call('HGET', LATE, 'j' .. named(model, job)), {}
  local members = packed and cmsgpack.unpack(packed) or {}
  for i = 1, #members do
    local at = call('ZSCORE', DATES, members[i][1])
    if at and now < at + HOUR then numbers[#numbers + 1] = match(members[i][1], '^%d+') end
  end
  return numbers
end

local function put_aside(model, job, note, nonce)
  local key = named(model, job)
  local packed = call('HGET', LATE, 'j' .. key)
  local members = packed and cmsgpack.unpack(packed) or {}
  for i = 1, #members do
    if members[i][2] == nonce then return end
  end
  local number = string.format('%015d', call('HINCRBY', LATE, 'number', 1)) -- so that notes of the same time are in order
  local member = number .. ':' .. #note .. ':' .. key
  members[#members + 1] = {member, nonce}
  call('HSET', LATE, number, note, 'j' .. key, cmsgpack.pack(members))
  call('ZADD', DATES, text(now), member)
  call('HINCRBY', LATE, 'bytes', #note)
  if #members > LATE_OF_JOB then drop_late(members[1][1]) end
  local old = call('ZRANGEBYSCORE', DATES, '-inf', text(now - HOUR), 'LIMIT', 0, 100)
  for i = 1, #old do drop_late(old[i]) end
  while call('ZCARD', DATES) > LATE_NOTES or tonumber(call('HGET', LATE, 'bytes')) > LATE_BYTES do
    local first = call('ZRANGE', DATES, 0, 0)[1]
    if not first then -- another program has changed the number of bytes
      call('DEL', LATE)
      return
    end
    drop_late(first)
  end
end

-- Ends a lease. With `kept`, the note for its holder is kept as a late note.
local function finish(p, l, kept)
  call('HDEL', p.name, l.fence)
  if l.job == '' then
    call('ZREM', p.name .. ':u', l.fence)
  else
    local key = named(p.model, l.job)
    if call('HGET', JOBS, key) == p.id .. ':' .. l.fence then call('HDEL', JOBS, key) end
    if l.noted then
      local note = kept and call('HGET', NOTES, key)
      if note then put_aside(p.model, l.job, note, l.fence) end
      call('HDEL', NOTES, key)
    end
  end
  if ends_by_time(p, l) then undate(p, l) end
  count(p, l.state, -1)
  freed[p] = true
end

-- Ends the leases of an endpoint that are not bound to a job, because the endpoint may get no more jobs.
local function clear(p)
  local fences = call('ZRANGE', p.name .. ':u', 0, -1)
  if #fences < p.unassigned then -- another program has deleted leases
    local all = call('HGETALL', p.name)
    for i = 1, #all, 2 do fences[(i + 1) / 2] = all[i] end
  end
  for i = 1, #fences do
    local l = match(fences[i], '^%d') and lease_at(p, fences[i])
    if l and l.job == '' then finish(p, l, false) end
  end
end

-- Ends leases that have expired. Returns how many leases were checked.
local function sweep(budget)
  local over = call('ZRANGEBYSCORE', LAPSES, '-inf', text(now), 'LIMIT', 0, budget)
  for i = 1, #over do
    local id, number = match(over[i], '^(%d+):(%d+)$')
    local p = place(id)
    local l = p and lease_at(p, number)
    if l and ends_by_time(p, l) then finish(p, l, true) end
    call('ZREM', LAPSES, over[i])
  end
  return #over
end

-- Endpoints

local function without(ids, id)
  local left = {}
  for i = 1, #ids do
    if ids[i] ~= id then left[#left + 1] = ids[i] end
  end
  return left
end

local function forget(p)
  local s = server_of(p.server)
  local ids = without(ids_of(p.model), p.id)
  s.ids = without(ids_at(s), p.id)
  if #s.ids > 0 then save_server(p.server) else call('HDEL', POOL, 's' .. p.server) end
  if #ids > 0 then call('HSET', POOL, 'm' .. p.model, cmsgpack.pack(ids)) else call('HDEL', POOL, 'm' .. p.model) end
  call('HDEL', POOL, 'n' .. named(p.model, p.server))
  call('DEL', p.name, p.name .. ':u')
  places[p.id] = false
end

local function ring(model) redis.pcall('PUBLISH', POOL .. ':' .. model, '') end

local function ring_if_room(p, s, rung)
  if not rung[p.model] and may_give(p) and held(p) < p.slots and room_of(s) > 0 then
    rung[p.model] = true
    ring(p.model)
  end
end

-- Stores the endpoints that have changed, and notifies the models for which slots have become free.
local function save_places()
  if counted then call('HSET', POOL, 'fence', text(fence)) end
  for id, p in pairs(places) do
    if p and p.changed then
      if p.removed and held(p) <= 0 then forget(p) else call('HSET', p.name, 'h', hot(p)) end
    end
  end
  local rung = {}
  for p in pairs(freed) do
    local s = server_of(p.server)
    if s.together == 0 then
      ring_if_room(p, s, rung)
    else
      local ids = ids_at(s)
      for i = 1, #ids do
        local other = place(ids[i])
        if other then ring_if_room(other, s, rung) end
      end
    end
  end
end

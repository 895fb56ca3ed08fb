-- Publishing of tasks whose unique key another task holds.

local SHARERS = 2000 -- number of members after which further tasks are left to the next call

-- Returns what happens to a task with a unique key: 0 if it is to be stored; otherwise the answer to its publish, and
-- the id and the record of the holder if that is to get its contents.
local function decide(q, u)
  local members, kept = members_with(q, u.k, 0, SHARING), nil
  for i = 1, #members do
    local id, held, r = sub(members[i], #u.k + 2), nil, nil
    local theirs = unique_of(q, id)
    if theirs and theirs.key == u.k then held, r = holds(q, id, theirs) end
    if not held then
      call('ZREM', q.name .. '/U', members[i])
    elseif u.c == 'replace' then
      if r then return 'replaced:' .. id, id, r end
      if now < theirs.till then kept = id end
    else
      return (u.c == 'refuse' and 'not_unique:' or 'duplicate:') .. id
    end
  end
  return kept and 'duplicate:' .. kept or 0
end

-- Returns the body of a task with another id. `sum`: the checksum of the body without an id.
local function renamed(body, sum, id)
  sum = bit.bnot(sum)
  for i = 1, #id do
    sum = bit.bxor(sum, string.byte(id, i))
    for _ = 1, 8 do sum = bit.bxor(bit.rshift(sum, 1), bit.band(0xEDB88320, -bit.band(sum, 1))) end
  end
  return sub(body, 1, -5) .. pack('>I4', bit.bnot(sum) % 4294967296)
end

-- Returns a body with the parents and the batch of another one instead of its own.
local function linked_as(body, former)
  local own = header_of(former)
  local links = cmsgpack.pack({replaced = true, after = own.after, batch = own.batch})
  return '\3' .. pack('>I4', #links) .. links .. body
end

-- Gives a task that was never delivered, `held`, the contents and the time of another one, whose id is remembered. It
-- keeps the tasks that it waits for, and its batch.
local function replace(q, held, r, id, packed, rare, about, body)
  be_refused(q)
  sharers = sharers + 20 -- a replacement takes as long as looking at so many members
  if packed then make_way(q, id, packed) end
  local u, not_before, deadline, tenant, entity = rare.u, told_of(about)
  local first, waited, former, state = unique_of(q, held).first, r.state == WAITING, r.entity, 'waiting'
  not_before, body = due_of(not_before, u, first), renamed(body, u.x, held)
  local blocked, linked = r.state == BLOCKED, has(r, KEPT) or has(r, MEMBER) or rare.a or rare.b
  local own
  if not blocked then
    own = withdraw(q, r, held, not linked)
  else -- it waits for the same tasks as before
    own, r.at = call('HGET', q.name .. '/b', held), now
    uncount_fresh(q, r)
  end
  if linked then body = linked_as(body, own or '') end
  if call('ZREM', q.name .. '/e', held) == 1 then index(q, '/e', ':deadlines') end
  if deadline ~= '' then note_deadline(q, held, deadline) end
  if is_fresh(r) and not blocked then q.fresh = q.fresh + 1 end
  r.priority, r.tenant, r.entity = tonumber(sub(about, 9, 9)), tenant, entity
  if entity ~= '' then q.sorted = true end
  if blocked then
    state = 'blocked'
    if q.sorted then count_fresh(q, r) end
    call('HSET', q.name .. '/b', held, body)
    waiting().delay(q, held, tonumber(not_before) or 0)
  elseif not_before ~= '' and tonumber(not_before) > now then
    state = 'scheduled'
    if q.sorted then count_fresh(q, r) end
    schedule(q, r, held, body, not_before)
  elseif not waited then
    make_available(q, r, held, body, deadline ~= '' and deadline or nil)
  else -- it does not lose its place: it comes before the entries that were never delivered
    use_lane(q, r.priority)
    put_back(q, r, held, body)
  end
  put_down(q, held, r)
  if former ~= '' and (state == 'scheduled' or former ~= entity) then release(q, {entity = former}, held) end
  claim(q, held, u, first)
  tags.drop(q, held)
  if rare.t then tags.put(q, held, rare.t) end
  note(q, 'replaced', held, r, state, nil, nil, nil, state ~= 'waiting' and not_before)
  local past = new_record(r.priority, sub(about, 1, 8), '', held)
  past.state = REPLACED
  put_down(q, id, past)
  remember(q, id, REPLACED)
end

-- Looks for tasks that hold the unique key of a task. Returns 0 if there are none; otherwise the answer to its publish,
-- after its contents have been given to the holder, if that is to be replaced; and whether further tasks must wait for
-- the next call, because of the many tasks that were looked at.
local function meet(q, id, packed, rare, about, body)
  local answer, held, r = decide(q, rare.u)
  if r then replace(q, held, r, id, packed, rare, about, body) end
  return answer, sharers >= SHARERS
end

-- Choosing the next entries from sorted lanes.

local function rest(q, tenant, opens_at)
  call('ZADD', q.name .. '/v', opens_at == math.huge and '+inf' or text(opens_at), tenant)
  for i = 1, #q.lanes do call('ZREM', q.name .. '/g' .. sub(q.lanes, i, i), tenant) end
end

-- Returns whether an entry in sorted lanes may be delivered; if not, also the time at which a rate limit may allow it.
local function servable(q)
  local due = call('ZRANGEBYSCORE', q.name .. '/v', '-inf', text(now), 'LIMIT', 0, floor(250 / math.max(1, #q.lanes)))
  for i = 1, #due do wake_tenant(q, due[i]) end
  if q.waiting > q.laned + q.held or not has_tenant_limits(q) then return true end
  forget_idle(q)
  for i = 1, #q.lanes do
    local name = q.name .. '/g' .. sub(q.lanes, i, i)
    for _ = 1, call('ZCARD', name) do
      if q.looked >= LOOKED_AT then return false end
      q.looked = q.looked + 1
      local tenant = call('ZRANGE', name, 0, 0)[1]
      local left, opens_at = tenant_room(q, tenant)
      if left > 0 then return true end
      rest(q, tenant, opens_at)
    end
  end
  local first = call('ZRANGE', q.name .. '/v', 0, 0, 'WITHSCORES')[2]
  return false, first and tonumber(first) < math.huge and tonumber(first) or nil
end

-- Each delivery costs its tenant a turn, and the tenant that has spent the least is next. Returns the tenants by turn;
-- the same, but with each tenant only at its last turn; the number of turns of each; what each had spent before (false
-- if all have the same number of turns, so that their order does not change); and whether each certainly has one turn.
local function walk_on(q, priority, want)
  local name = q.name .. '/g' .. priority
  local told = call('ZRANGE', name, 0, want - 1, 'WITHSCORES')
  local turns, number, before, tenants = {}, {}, {}, {}
  if flow_of(q).weighted == 0 and not has_tenant_limits(q) then -- every tenant gets the same number of turns
    local n = #told / 2
    for i = 1, n do
      local tenant = told[2 * i - 1]
      turns[i], tenants[i], before[tenant] = tenant, tenant, told[2 * i]
      number[tenant] = floor(want / n)
    end
    for i = n + 1, n > 0 and want or 0 do turns[i] = turns[i - n] end
    for i = 1, n > 0 and want % n or 0 do
      local tenant = turns[i]
      number[tenant] = number[tenant] + 1
      tenants[n + i], tenants[i] = tenant, false
    end
    local whole = n > 0 and want % n == 0 and (n < want or call('ZCARD', name) == n)
    return turns, tenants, number, not whole and before, n == want
  end
  local who, spent, left = {}, {}, {}
  for i = 1, #told, 2 do who[#who + 1], spent[#spent + 1] = told[i], tonumber(told[i + 1]) end
  if #who > 0 then
    read_tenants(q, who)
    if flow_of(q).weighted > 0 then read_weights(q, who) end
  end
  local first, last = 1, #who
  while #turns < want and first <= last do
    local tenant, at = who[first], spent[first]
    first = first + 1
    if not before[tenant] then
      local opens_at
      before[tenant], number[tenant] = at, 0
      left[tenant], opens_at = tenant_room(q, tenant)
      if left[tenant] == 0 then
        rest(q, tenant, opens_at)
        q.looked = q.looked + 1
      end
    end
    if left[tenant] > number[tenant] then
      number[tenant] = number[tenant] + 1
      turns[#turns + 1] = tenant
      if left[tenant] > number[tenant] then
        local j = last
        at = spend(q, at, tenant, 1)
        while j >= first and spent[j] > at do
          who[j + 1], spent[j + 1] = who[j], spent[j]
          j = j - 1
        end
        who[j + 1], spent[j + 1] = tenant, at
        last = last + 1
      end
    end
  end
  local last_turn = {}
  for i = 1, #turns do last_turn[turns[i]] = i end
  for i = 1, #turns do tenants[i] = last_turn[turns[i]] == i and turns[i] end
  return turns, tenants, number, before
end

local function has_deadlines(q)
  if q.dated == nil then q.dated = q.extras and call('EXISTS', q.name .. '/e') == 1 end
  return q.dated
end

-- Counts the members that were taken from a lane, and returns them without those that no script has added. `step`:
-- distance between two members in `some`.
local function sound_members(q, some, step)
  local sound, n = {}, 0
  for i = 1, #some, step do
    if string.find(some[i], '^[sr]%d+$') then
      n = n + 1
      sound[n] = some[i]
    else
      call('HINCRBY', META, 'anomalies', 1)
    end
  end
  left_lanes(q, n)
  return sound
end

-- Adds the entries that were taken from a lane to a list. Entries past their deadline cost no turn: they are ended.
-- Returns whether enough have ended in this way. `step`: distance between two entries in `some`.
local function add_live(q, priority, some, step, list, expire)
  local enough = false
  some = sound_members(q, some, step)
  for i = 1, #some do
    local name, fence = stream_of(q, sub(some[i], 1, 1), priority), sub(some[i], 2)
    local fields = has_deadlines(q) and fields_at(name, fence)
    local deadline = fields and fields[4] and tonumber(string.match(fields[4], '%d*$'))
    local r = deadline and deadline <= now and record_of_entry(q, fields[1], fence)
    if r then
      if is_fresh(r) then q.fresh = q.fresh - 1 end
      enough = expire(q, fields[1], r, name, fence, #fields[2])
    else
      list[#list + 1] = some[i]
    end
  end
  return enough
end

-- The following functions take entries from their lanes, in fair order or first in, first out, and return their
-- members.

-- For tenants that each have one turn, and entries without deadlines.
local function pick_one_each(q, priority, tenants, before)
  local members, spent = {}, {}
  for i = 1, #tenants do
    local tenant = tenants[i]
    local member = call('ZPOPMIN', lane_of(q, priority, tenant))[1]
    if member then
      members[#members + 1] = member
      if before then spent[#spent + 1], spent[#spent + 2] = spend(q, before[tenant], tenant, 1), tenant end
    else
      leave_walk(q, priority, tenant)
    end
  end
  return sound_members(q, members, 1), spent
end

local function pick_turns(q, priority, turns, tenants, number, before, expire)
  local members, spent, lists, at = {}, {}, {}, {}
  for i = 1, #tenants do
    local tenant = tenants[i]
    if tenant then
      local list, missing, enough = {}, number[tenant], false
      while missing > 0 and not enough do
        local some = call('ZPOPMIN', lane_of(q, priority, tenant), missing)
        enough = not some[1] or add_live(q, priority, some, 2, list, expire)
        if not some[1] then leave_walk(q, priority, tenant) end
        missing = number[tenant] - #list
      end
      if before and #list > 0 then spent[#spent + 1], spent[#spent + 2] = spend(q, before[tenant], tenant, #list), tenant end
      lists[tenant], at[tenant] = list, 0
    end
  end
  for i = 1, #turns do
    local tenant = turns[i]
    at[tenant] = at[tenant] + 1
    members[#members + 1] = lists[tenant][at[tenant]]
  end
  return members, spent
end

local function pick_fair(q, priority, want, expire)
  local turns, tenants, number, before, once = walk_on(q, priority, want)
  local members, spent
  if once and not has_deadlines(q) then
    members, spent = pick_one_each(q, priority, turns, before)
  else
    members, spent = pick_turns(q, priority, turns, tenants, number, before, expire)
  end
  if #spent > 0 and q.laned > 0 then call('ZADD', q.name .. '/g' .. priority, 'XX', unpack(spent)) end
  return members
end

local function pick_first(q, priority, want, expire)
  local members, tenant, _, upto = {}, first_tenant(q, priority)
  local enough = false
  while #members < want and tenant and not enough do
    local name = lane_of(q, priority, tenant)
    local some = call('ZRANGEBYSCORE', name, '-inf', upto or '+inf', 'LIMIT', 0, want - #members)
    call('ZREM', name, unpack(some))
    enough = add_live(q, priority, some, 1, members, expire)
    tenant, _, upto = first_tenant(q, priority)
  end
  return members
end

-- Returns whether a priority has tenants whose turn may come.
local function has_tenants(q, priority)
  return call('EXISTS', q.name .. (flow_of(q).fair == 1 and '/g' or '/w') .. priority) == 1
end

local function claim(name, token, fences)
  fences[#fences + 1] = 'FORCE'
  local claimed = of_group('XCLAIM', name, 'g', token, 0, unpack(fences))
  if claimed then return claimed end
  call('XGROUP', 'CREATE', name, 'g', '0', 'MKSTREAM')
  return call('XCLAIM', name, 'g', token, 0, unpack(fences))
end

-- Takes the next entries from their lanes and makes a consumer their owner. Returns {lane, number, entries} per run of
-- entries from one stream. A run has fewer entries than that number if another program has deleted some. Returns
-- nothing if no entry is waiting.
local function line_up(q, priority, want, token, expire)
  local members = (flow_of(q).fair == 1 and pick_fair or pick_first)(q, priority, want, expire)
  if #members == 0 then return has_tenants(q, priority) and {} or nil end
  local runs, at = {}, 1
  while at <= #members do
    local kind, fences, n = sub(members[at], 1, 1), {}, 0
    while at <= #members and sub(members[at], 1, 1) == kind do
      n = n + 1
      fences[n] = sub(members[at], 2)
      at = at + 1
    end
    call('SADD', PARTITION .. ':o:' .. token, kind .. priority .. q.key)
    runs[#runs + 1] = {kind .. priority, n, claim(stream_of(q, kind, priority), token, fences)}
  end
  return runs
end

-- Counts deliveries for their tenants. `given`: in the format that `receive` returns.
local function note_flying(q, given)
  local epoch, ids = flow_of(q).epoch, {}
  if epoch == 0 then return end
  for i = 2, #given, 4 do ids[#ids + 1] = given[i] end
  local records, written, tenants, unmarked, flying = call('HMGET', q.name .. '/t', unpack(ids)), {}, {}, {}, {}
  for i = 1, #ids do
    local packed = records[i]
    if packed and #packed >= RECORD_SIZE then
      local tenant, marks = marked(packed)
      if not flying[tenant] then
        tenants[#tenants + 1] = tenant
        unmarked[tenant], flying[tenant] = 0, 0
      end
      flying[tenant] = flying[tenant] + 1
      if marks == 4 * epoch + 1 then unmarked[tenant] = unmarked[tenant] + 1 end
      written[#written + 1], written[#written + 2] = ids[i], with_marks(packed, 4 * epoch + 2)
    end
  end
  if #written == 0 then return end
  call('HSET', q.name .. '/t', unpack(written))
  read_tenants(q, tenants)
  for i = 1, #tenants do
    local tenant = tenants[i]
    local s = note_tenant(q, tenant, -unmarked[tenant], flying[tenant])
    if flow_of(q).tenant_tokens > 0 then s.tokens = s.tokens - flying[tenant] end
  end
end

local function waits(q, priority)
  if q.sorted then return has_tenants(q, priority) end
  local name = stream_of(q, 's', priority)
  return call('EXISTS', q.name .. '/z' .. priority) == 1
    or call('XRANGE', name, last_delivered(name), '+', 'COUNT', 1)[1] ~= nil
end

-- Gives each priority with waiting entries its share of deliveries, even if a higher priority has waiting entries. The
-- lower priorities take turns. `owed`: the lower priority that had the last turn, plus the part of the next delivery
-- that their shares amount to.
local function serve_floor(q, want, serve_class)
  local f, waiting = flow_of(q), {}
  for i = 1, #q.lanes do
    local priority = sub(q.lanes, i, i)
    if waits(q, priority) then waiting[#waiting + 1] = priority end
  end
  local served = 0
  while served < want and #waiting > 0 do
    if #waiting == 1 then
      local n = serve_class(q, waiting[1], want - served)
      return served + n
    end
    local last, share = floor(f.owed), (#waiting - 1) * math.min(f.floor, 1 / #waiting)
    local owed, place = f.owed - last + share, 1
    local lower = owed > 1 - 1e-9
    -- number of deliveries until the shares amount to one
    local n = lower and 1 or math.min(want - served, math.max(1, math.ceil((1 - 1e-9 - owed) / share)))
    if lower then
      place = 2
      while place < #waiting and tonumber(waiting[place]) >= last do place = place + 1 end
      if tonumber(waiting[place]) >= last then place = 2 end
    end
    local got = serve_class(q, waiting[place], n)
    served = served + got
    if lower and got > 0 then
      f.owed = waiting[place] + math.max(0, owed - 1)
    else
      f.owed = f.owed + got * share
    end
    q.flow_changed, q.save = true, save_order
    if got < n or not waits(q, waiting[place]) then table.remove(waiting, place) end
  end
  return served
end

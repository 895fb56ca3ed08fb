-- Who is next in sorted lanes.

local function rest(q, tenant, opens_at)
  call('ZADD', q.name .. '/v', opens_at == math.huge and '+inf' or text(opens_at), tenant)
  for i = 1, #q.lanes do call('ZREM', q.name .. '/g' .. sub(q.lanes, i, i), tenant) end
end

-- Whether anything in sorted lanes may be handed out; if not, when that may change by time alone.
local function servable(q)
  local due = call('ZRANGEBYSCORE', q.name .. '/v', '-inf', text(now), 'LIMIT', 0, 1000)
  for i = 1, #due do wake_tenant(q, due[i]) end
  if q.waiting > q.laned + q.held or not has_tenant_limits(q) then return true end
  forget_idle(q)
  for i = 1, #q.lanes do
    local name = q.name .. '/g' .. sub(q.lanes, i, i)
    for _ = 1, call('ZCARD', name) do
      local tenant = call('ZRANGE', name, 0, 0)[1]
      local left, opens_at = tenant_room(q, tenant)
      if left > 0 then return true end
      rest(q, tenant, opens_at)
    end
  end
  local first = call('ZRANGE', q.name .. '/v', 0, 0, 'WITHSCORES')[2]
  return false, first and tonumber(first) < math.huge and tonumber(first) or nil
end

-- Each hand-out costs its tenant a turn; who has spent the least is next. Answers the tenants in turn, each once in the order of
-- its last turn, how many turns each has, what it has spent before, and whether each surely has one turn.
local function walk_on(q, priority, want)
  local told = call('ZRANGE', q.name .. '/g' .. priority, 0, want - 1, 'WITHSCORES')
  local turns, number, before, tenants = {}, {}, {}, {}
  if flow_of(q).weighted == 0 and not has_tenant_limits(q) then -- round by round
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
    return turns, tenants, number, before, n == want
  end
  local who, spent, left = {}, {}, {}
  for i = 1, #told, 2 do who[#who + 1], spent[#spent + 1] = told[i], tonumber(told[i + 1]) end
  if #who > 0 then read_tenants(q, who) end
  local first, last = 1, #who
  while #turns < want and first <= last do
    local tenant, at = who[first], spent[first]
    first = first + 1
    if not before[tenant] then
      local opens_at
      before[tenant], number[tenant] = at, 0
      left[tenant], opens_at = tenant_room(q, tenant)
      if left[tenant] == 0 then rest(q, tenant, opens_at) end
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

-- Of entries that were taken from their lanes, ends those past their deadline. Adds the others to a list.
local function add_live(q, ids, step, list, expire)
  local dated = has_deadlines(q)
  left_lanes(q, #ids / step)
  for i = 1, #ids, step do
    local id = ids[i]
    local deadline = dated and call('ZSCORE', q.name .. '/e', id)
    if deadline and tonumber(deadline) <= now then
      local r = read_record(call('HGET', q.name .. '/t', id))
      leave_fresh(q, r)
      drop_body(q, id)
      expire(q, id, r)
    else
      list[#list + 1] = id
    end
  end
end

-- The next are taken from their lanes in fair order or first in, first out. Each answers their ids, and whose they are.

-- Where each tenant has one turn, and nothing a deadline.
local function pick_one_each(q, priority, tenants, before)
  local ids, whose, spent = {}, {}, {}
  for i = 1, #tenants do
    local tenant = tenants[i]
    local id = call('ZPOPMIN', lane_of(q, priority, tenant))[1]
    if id then
      ids[#ids + 1], whose[#whose + 1] = id, tenant
      spent[#spent + 1], spent[#spent + 2] = spend(q, before[tenant], tenant, 1), tenant
    else
      leave_walk(q, priority, tenant)
    end
  end
  left_lanes(q, #ids)
  if #spent > 0 and q.laned > 0 then call('ZADD', q.name .. '/g' .. priority, unpack(spent)) end
  return ids, whose
end

local function pick_fair(q, priority, want, expire)
  local turns, tenants, number, before, once = walk_on(q, priority, want)
  if once and not has_deadlines(q) then return pick_one_each(q, priority, turns, before) end
  local lists, spent = {}, {}
  for i = 1, #tenants do
    local tenant = tenants[i]
    if tenant then
      local list, missing = {}, number[tenant]
      while missing > 0 do
        local some = call('ZPOPMIN', lane_of(q, priority, tenant), missing)
        if not some[1] then break end
        add_live(q, some, 2, list, expire)
        missing = number[tenant] - #list
      end
      lists[tenant] = list
      if missing > 0 then
        leave_walk(q, priority, tenant)
      elseif q.laned > 0 then
        spent[#spent + 1], spent[#spent + 2] = spend(q, before[tenant], tenant, #list), tenant
      end
    end
  end
  if #spent > 0 and q.laned > 0 then call('ZADD', q.name .. '/g' .. priority, unpack(spent)) end
  local ids, whose, at = {}, {}, {}
  for i = 1, #turns do
    local tenant = turns[i]
    local n = (at[tenant] or 0) + 1
    local id = lists[tenant][n]
    if id then ids[#ids + 1], whose[#whose + 1], at[tenant] = id, tenant, n end
  end
  return ids, whose
end

local function pick_first(q, priority, want, expire)
  local ids, whose, tenant, _, upto = {}, {}, first_tenant(q, priority)
  while #ids < want and tenant do
    local name = lane_of(q, priority, tenant)
    local some = call('ZRANGEBYSCORE', name, '-inf', upto or '+inf', 'LIMIT', 0, want - #ids)
    call('ZREM', name, unpack(some))
    add_live(q, some, 1, ids, expire)
    for i = #whose + 1, #ids do whose[i] = tenant end
    tenant, _, upto = first_tenant(q, priority)
  end
  return ids, whose
end

-- Whether a priority has tenants whose turn may come.
local function has_tenants(q, priority)
  return call('EXISTS', q.name .. (flow_of(q).fair == 1 and '/g' or '/w') .. priority) == 1
end

-- Turns waiting entries into entries of the stream of returned ones, in flight with a consumer. Answers them as `receive` does;
-- nothing where nobody is there.
local function line_up(q, priority, want, token, expire)
  local ids, whose = (flow_of(q).fair == 1 and pick_fair or pick_first)(q, priority, want, expire)
  if #ids == 0 then return has_tenants(q, priority) and {} or nil end
  local records, bodies = call('HMGET', q.name .. '/t', unpack(ids)), call('HMGET', q.name .. '/b', unpack(ids))
  call('HDEL', q.name .. '/b', unpack(ids))
  local written, given, fences, unmarked, flying, tenants = {}, {}, {}, {}, {}, {}
  local name, epoch = stream_of(q, 'r', priority), flow_of(q).epoch
  local marks = epoch > 0 and 4 * epoch + 2 or 0
  local flies = pack('>H', marks)
  for i = 1, #ids do
    local id, packed, body, more = ids[i], records[i], bodies[i], ''
    local sequence, deadline = next_seq(q), has_deadlines(q) and call('ZSCORE', q.name .. '/e', id)
    local fence, fresh = text(sequence), sub(packed, 4, 11) == NEVER
    if fresh and not deadline then
      call('XADD', name, fence, id, body)
    else
      local r = read_record(packed)
      r.fence = sequence
      more = select(2, enter_stream(q, 'r', r, id, body, deadline))
    end
    if fresh then q.fresh = q.fresh - 1 end
    if epoch > 0 then
      local tenant = whose[i]
      if not flying[tenant] then
        tenants[#tenants + 1] = tenant
        unmarked[tenant], flying[tenant] = 0, 0
      end
      flying[tenant] = flying[tenant] + 1
      if #packed > RECORD_SIZE and unpack_struct('>H', packed, RECORD_SIZE + 1) == marks - 1 then
        unmarked[tenant] = unmarked[tenant] + 1
      end
    end
    fences[i] = fence
    written[2 * i - 1], written[2 * i] = id, flying_record(packed, sequence, flies)
    given[4 * i - 3], given[4 * i - 2], given[4 * i - 1], given[4 * i] = fence, id, body, more
  end
  if #tenants > 0 then read_tenants(q, tenants) end
  local taxed = flow_of(q).tenant_tokens > 0
  for i = 1, #tenants do
    local tenant = tenants[i]
    local s = note_tenant(q, tenant, -unmarked[tenant], flying[tenant])
    if taxed then s.tokens = s.tokens - flying[tenant] end
  end
  call('HSET', q.name .. '/t', unpack(written))
  local last = fences[#fences]
  fences[#fences + 1], fences[#fences + 2] = 'FORCE', 'JUSTID'
  fences[#fences + 1], fences[#fences + 2] = 'LASTID', last
  local claimed = redis.pcall('XCLAIM', name, 'g', token, 0, unpack(fences))
  if claimed.err then
    call('XGROUP', 'CREATE', name, 'g', '0')
    call('XCLAIM', name, 'g', token, 0, unpack(fences))
  end
  return given
end

-- Brings what waits in plain lanes into sorted ones, first come, first served. Answers how many.
local function sort_some(q, budget)
  local moved = 0
  for i = 1, #q.lanes do
    local priority = sub(q.lanes, i, i)
    local popped = budget > moved and call('ZPOPMIN', q.name .. '/z' .. priority, budget - moved) or {}
    for j = 1, #popped, 2 do
      local r = read_record(call('HGET', q.name .. '/t', popped[j]))
      q.back = q.back - 1
      enter_sorted(q, r, popped[j], true)
      call('HSET', q.name .. '/t', popped[j], write_record(r))
    end
    moved = moved + #popped / 2
    local name = stream_of(q, 's', priority)
    local entries = budget > moved and call('XRANGE', name, last_delivered(name), '+', 'COUNT', budget - moved) or {}
    for j = 1, #entries do
      local id, body = entries[j][2][1], entries[j][2][2]
      local packed = call('HGET', q.name .. '/t', id)
      call('XDEL', name, entries[j][1])
      if packed then
        local r = read_record(packed)
        call('HSET', q.name .. '/b', id, body)
        enter_sorted(q, r, id)
        call('HSET', q.name .. '/t', id, write_record(r))
      else
        call('HINCRBY', META, 'anomalies', 1)
      end
    end
    moved = moved + #entries
  end
  return moved
end

-- Counts some of what is there for its tenant, from a cursor on. Answers the next cursor, "0" at the end.
local function count_some(q, cursor, budget)
  local told = call('HSCAN', q.name .. '/t', cursor, 'COUNT', budget)
  for i = 1, #told[2], 2 do
    local id, r = told[2][i], read_record(told[2][i + 1])
    local marks = r.marks
    if r.state == WAITING and (r.place == FRESH or r.place == AGAIN)
      and holder(stream_of(q, r.place == AGAIN and 'r' or 's', r.priority), text(r.fence)) then
      if marks_of(q, r) == 0 then
        mark(q, r, 2)
        note_tenant(q, r.tenant, 0, 1)
      end
    elseif is_live(r) then
      count_fresh(q, r)
    end
    if r.marks ~= marks then call('HSET', q.name .. '/t', id, write_record(r)) end
  end
  return told[1]
end

local function waits(q, priority)
  if q.sorted then return has_tenants(q, priority) end
  local name = stream_of(q, 's', priority)
  return call('EXISTS', q.name .. '/z' .. priority) == 1
    or call('XRANGE', name, last_delivered(name), '+', 'COUNT', 1)[1] ~= nil
end

-- Serves the lowest priority that waits its share while a higher one waits too.
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
    local owed = f.owed + f.floor
    local lowest = owed > 1 - 1e-9
    -- so many more until a whole one has gathered
    local n = lowest and 1 or math.min(want - served, math.max(1, math.ceil((1 - 1e-9 - owed) / f.floor)))
    local place = lowest and #waiting or 1
    local got = serve_class(q, waiting[place], n)
    served = served + got
    f.owed = f.owed + got * f.floor - (lowest and got or 0)
    q.flow_changed, q.save = true, save_order
    if got < n or not waits(q, waiting[place]) then table.remove(waiting, place) end
  end
  return served
end

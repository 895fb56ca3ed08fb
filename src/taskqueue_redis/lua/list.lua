--@ base queue states record counts streams flow tenants lanes cold kin damage places ranks
-- Lists tasks of a queue that are in one state, or have a tag.
-- ARGV: key, state or "tag", position after which the page begins ("" for the first page), maximum number of tasks, maximum
-- number of records to look at, "1" for the reverse order, and what the tasks must have ("" for anything): tenant, tag, number
-- of the state (10 for in flight), worker; for a list by time, the first time and the time before which the last one is; then,
-- for tasks in flight of a worker, the tokens of its consumers.
-- Returns the tasks, see `look`; the position after which the next page begins ("" after the last page); and how many
-- records were looked at.
-- A position is the name of a section and what its pages begin after. Sections, in the order of their tasks: of waiting
-- tasks, `zN`, `rN` and `sN` per priority, and `J`; of those in flight a priority; of others the state.
local q, kind, position, want, budget = queue(ARGV[3]), ARGV[4], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local newest, tenant, wanted, state, worker = ARGV[8] == '1', ARGV[9], ARGV[10], tonumber(ARGV[11]), ARGV[12]
local since, before = tonumber(ARGV[13]), tonumber(ARGV[14])
local IN_FLIGHT, ERROR = 10, 800 -- ERROR: maximum number of bytes of an error
local answers, looked, last = {}, 0, ''
local colds, tagged = call('EXISTS', q.name .. '/x') == 1, call('EXISTS', q.name .. '/I') == 1
local filtered = tenant ~= '' or worker ~= '' or state
local at_once = call('HGET', q.name, 'large') and 4 or 500
local workers = {}

local function worker_of(token)
  workers[token] = workers[token] or call('HGET', PARTITION .. ':c:' .. token, 'worker') or ''
  return workers[token]
end

-- Adds a task to the answer if it has what is asked for: {id, number of its state, attempt, losses, priority, tenant,
-- ordering key, time of the last change, due time, worker, reason of a dead letter, last error, its tags with a NUL before
-- each, time of the last delivery}. `r`: its record; nothing if the task is elsewhere. `idle`: milliseconds since its delivery.
local function look(id, r, due, token, idle)
  looked = looked + 1
  if not r then return end
  local who, is, entity, delivered = token and worker_of(token) or '', token and IN_FLIGHT or r.state, r.entity, ''
  if idle then delivered = text(now - idle * 1000) end
  if is_over(r) then
    who, entity, delivered = r.batch, '', string.match(r.entity, '^[1-9]%d*$') or ''
  end
  if tenant ~= '' and r.tenant ~= tenant or state and is ~= state then return end
  if worker ~= '' and is ~= DEAD and who ~= worker then return end
  local cold = colds and call('HGET', q.name .. '/x', id) and read_cold(q, id) or nil
  local failure, _, own = cold and cold.h[#cold.h] or {}, nil, nil
  if is == DEAD and cold then
    local by, since = last_run(cold, r.attempt)
    who, delivered = by or '', since > 0 and text(since) or ''
  end
  if worker ~= '' and who ~= worker then return end
  if tagged then _, own = tags.of(q, id) end
  local error = type(failure[3]) == 'string' and sub(failure[3], 1, ERROR) or ''
  answers[#answers + 1] = {id, is, r.attempt, r.losses, r.priority, r.tenant, entity, text(r.at), due or '', who,
    cold and cold.r or '', error, own or '', delivered}
end

local function is_full() return #answers >= want or looked >= budget or looked > 0 and bytes >= BYTES end

-- Returns whether a sound record has another tenant than the list, without the cost of reading all of it.
local own_tenant = tenant .. '/'
local function is_of_another(packed)
  if tenant == '' or not packed or #packed < RECORD_SIZE or not fits(string.byte(packed, 1, 3)) then return false end
  if #packed == RECORD_SIZE then return true end
  local there = RECORD_SIZE + 4
  return sub(packed, there, there + #tenant) ~= own_tenant and string.find(packed, '/', there, true) ~= nil
end

-- Returns the record of the task of a member; a record that is missing or damaged is built, but not stored.
local function record_in(id, packed, is, place, priority, seq)
  if is_of_another(packed) then return end
  local r = read_record(packed)
  if r then return r.state == is and r.place == place and r or nil end
  local body = call('HGET', q.name .. '/b', id)
  return body and built(q, id, is, place, priority or 5, seq, body)
end

-- Returns up to `n` entries in flight of a range, of one consumer or of all.
local function flying(name, first, last_one, n, token)
  return of_group('XPENDING', name, 'g', first, last_one, n, unpack({token})) or {}
end

-- Each of the following functions returns up to `n` items of a section that come after `from`, or before it with `newest`:
-- {position, id, record, due time, token, number of bytes, milliseconds since the delivery, time by which the list is
-- sorted}; and whether these are all. The items of a list by time begin with those at the time that was asked for.

local function of_set(set, is, place, priority)
  local name = q.name .. set
  -- Returns the time of a member: when the task is due, or became a dead letter. The score of a dead letter is its sequence
  -- number, which may be later.
  local function time_of(score, packed)
    local r = is == DEAD and read_record(packed)
    return r and r.state == DEAD and r.at or tonumber(score)
  end
  local function rank_at(time)
    if is ~= DEAD then return call('ZCOUNT', name, '-inf', '(' .. text(time)) end
    return number_before(time, call('ZCARD', name), function(rank)
      local member, score = unpack(call('ZRANGE', name, rank, rank, 'WITHSCORES'))
      return time_of(score, call('HGET', q.name .. '/t', member))
    end, newest)
  end
  return function(from, n)
    local first, score, member = 0, string.match(from or '', '^([^:]+):(.*)$')
    if newest then
      local upto = score and rank_of(name, score, member) or before and rank_at(before) or call('ZCARD', name)
      first = math.max(0, upto - n)
      n = upto - first
    elseif score then
      local rank, there = rank_of(name, score, member)
      first = there and rank + 1 or rank
    elseif since then
      first = rank_at(since)
    end
    local members = n > 0 and call('ZRANGE', name, first, first + n - 1, 'WITHSCORES') or {}
    local ids, items = {}, {}
    for i = 1, #members, 2 do ids[#ids + 1] = set == '/d' and sub(members[i], 18) or members[i] end
    local records = #ids > 0 and call('HMGET', q.name .. '/t', unpack(ids))
    for i = 1, #ids do
      local j = newest and #ids + 1 - i or i
      local own, at = members[2 * j - 1], members[2 * j]
      items[i] = {at .. ':' .. own, ids[j], record_in(ids[j], records[j], is, place, priority,
        set == '/d' and sub(own, 1, 17) or at), set == '/d' and at, nil, nil, nil,
        (since or before) and time_of(at, records[j])}
    end
    return items, newest and first == 0 or not newest and #ids < n
  end
end

-- Returns the sequence number in the id of an entry; and the whole id, if another program has chosen it.
local function fence_of(id) return string.match(id, '^%d+'), sub(id, -2) ~= '-0' and id end

-- Returns the limit of a range that leaves out an entry. `place`: its sequence number, or the whole id.
local function without(place) return '(' .. place .. (string.find(place, '-', 1, true) and '' or '-0') end

-- Returns an item for an entry of a stream. `packed`: the record of its task.
local function item_of(fence, fields, packed, place, priority, token, idle)
  local id, size = fields[1], #fields[2]
  if is_of_another(packed) then return {fence, id, nil, false, token, size} end
  local r = read_record(packed)
  if r and (r.state ~= WAITING or r.place ~= place or text(r.fence) ~= fence) then
    r = nil -- a second entry of a task that is elsewhere
  elseif not r and (packed or size > 7 and string.byte(fields[2]) < 4) then
    r = built(q, id, WAITING, place, priority, fence, unpack(fields, 2, 4))
  end
  return {fence, id, r, false, token, size, idle}
end

local function of_stream(stream, priority)
  local name, place = stream_of(q, stream, priority), stream == 's' and FRESH or AGAIN
  return function(from, n)
    local first = q.sorted and '-' or last_delivered(name) -- in sorted lanes, entries before it may be waiting
    local entries
    if newest then
      entries = call('XREVRANGE', name, from and without(from) or '+', first, 'COUNT', n)
    else
      local passed = tonumber(string.match(first, '%d+'))
      if from and tonumber((fence_of(from))) >= (passed or 0) then first = without(from) end
      entries = call('XRANGE', name, first, '+', 'COUNT', n)
    end
    local held, ids, items = {}, {}, {}
    for i = 1, #entries do ids[i] = entries[i][2][1] end
    local records = #ids > 0 and call('HMGET', q.name .. '/t', unpack(ids))
    if q.sorted and #entries > 0 then
      local one, other = entries[1][1], entries[#entries][1]
      local pending = flying(name, newest and other or one, newest and one or other, #entries)
      for i = 1, #pending do held[pending[i][1]] = true end
    end
    for i = 1, #entries do
      local fence, foreign = fence_of(entries[i][1])
      items[i] = (foreign or held[entries[i][1]]) and {foreign or fence}
        or item_of(fence, entries[i][2], records[i], place, priority)
    end
    return items, #entries < n
  end
end

-- The entries of `of_stream` that were never delivered, of one tenant, by its sorted lane. Their scores are their sequence
-- numbers, as long as no other program has written there.
local function of_lane(priority)
  local name, stream = lane_of(q, priority, tenant), stream_of(q, 's', priority)
  return function(from, n)
    n = math.min(n, want - #answers + 1)
    local edge, members = from and '(' .. fence_of(from), nil
    if newest then
      members = call('ZRANGE', name, edge or '9e16', '1', 'BYSCORE', 'REV', 'LIMIT', 0, n, 'WITHSCORES')
    else
      members = call('ZRANGE', name, edge or '1', '9e16', 'BYSCORE', 'LIMIT', 0, n, 'WITHSCORES')
    end
    local items = {}
    for i = 1, #members, 2 do
      local fence, at = string.match(members[i], '^s([1-9]%d*)$'), tonumber(members[i + 1])
      local fields = fence and #fence < 18 and fields_at(stream, fence)
      local item = fields and item_of(fence, fields, call('HGET', q.name .. '/t', fields[1]), FRESH, priority) or {}
      item[1] = text(newest and floor(at) or math.ceil(at))
      items[#items + 1] = item
    end
    return items, #items < n
  end
end

-- Returns some entries in flight before a sequence number, up to `n`, the last ones, and whether these are all. There is no
-- command for this, so the range is widened or halved until it has a quarter of them or more, but not too many.
local function flying_before(name, upto, n, token)
  local summary = of_group('XPENDING', name, 'g')
  if not summary or tonumber(summary[1]) == 0 then return {}, true end
  local lowest, highest = tonumber((fence_of(summary[2]))), tonumber((fence_of(summary[3])))
  if upto then highest = math.min(highest, tonumber(upto) - 1) end
  local few, width, crowded = -1, 1000000, nil
  for _ = 1, highest >= lowest and 60 or 0 do
    local from = math.max(lowest, highest - width)
    local some = flying(name, text(from), text(highest), n + 1, token)
    if #some > n then
      crowded = width
    elseif 4 * #some >= n or from == lowest then
      return some, from == lowest
    else
      few = width
    end
    width = crowded and floor((few + crowded) / 2) or width * 8
  end
  return {}, true
end

-- Returns the fields of entries of a stream by their sequence numbers. `fences`: these, in the order of the list. Entries in
-- flight are often next to each other: as long as all that were read are wanted, the next command reads more.
local function fields_of(name, fences)
  local found, i, step, n = {}, newest and #fences or 1, newest and -1 or 1, 1
  while i >= 1 and i <= #fences do
    local some = call('XRANGE', name, fences[i], fences[newest and 1 or #fences], 'COUNT', n)
    local upto, passed = some[1] and tonumber((fence_of(some[#some][1]))) or math.huge, 0
    for j = 1, #some do
      local fence = fence_of(some[j][1])
      found[fence] = found[fence] or some[j][2]
    end
    while i >= 1 and i <= #fences and tonumber(fences[i]) <= upto do i, passed = i + step, passed + 1 end
    n = passed >= #some and math.min(4 * n, 64) or 1
  end
  return found
end

local function of_flight(priority)
  return function(from, n)
    local tokens = {}
    for i = 15, #ARGV do tokens[#tokens + 1] = ARGV[i] end
    if worker ~= '' and #tokens == 0 then return {}, true end
    local each = math.min(n, math.max(1, floor(1000 / math.max(1, #tokens))))
    local entries, limit, all = {}, nil, true -- `limit`: beyond it there may be others that were not read
    for _, stream in ipairs({'s', 'r'}) do
      local name = stream_of(q, stream, priority)
      for i = 1, math.max(1, #tokens) do
        local some, complete
        if newest then
          some, complete = flying_before(name, from, each, tokens[i])
        else
          some = flying(name, from and '(' .. from .. '-18446744073709551615' or '-', '+', each, tokens[i])
          complete = #some < each
        end
        for j = 1, #some do
          local fence, foreign = fence_of(some[j][1])
          some[j] = {tonumber(fence), stream, some[j][2], foreign, some[j][3]}
          entries[#entries + 1] = some[j]
        end
        if not complete then
          local edge = some[newest and 1 or #some][1]
          limit = not limit and edge or newest and math.max(limit, edge) or not newest and math.min(limit, edge)
          all = false
        end
      end
    end
    table.sort(entries, function(one, other)
      if newest then return one[1] > other[1] end
      return one[1] < other[1]
    end)
    local shown, fences, fields, ids, items = {}, {s = {}, r = {}}, {}, {}, {}
    for i = 1, #entries do
      local fence, stream, _, foreign = unpack(entries[i], 1, 4)
      if limit and (newest and fence < limit or not newest and fence > limit) then break end
      if i > n then all = false break end
      shown[i] = entries[i]
      if not foreign then table.insert(fences[stream], text(fence)) end
    end
    for stream, some in pairs(fences) do fields[stream] = fields_of(stream_of(q, stream, priority), some) end
    for i = 1, #shown do ids[i] = (fields[shown[i][2]][text(shown[i][1])] or {''})[1] end
    local records = #ids > 0 and call('HMGET', q.name .. '/t', unpack(ids))
    for i = 1, #shown do
      local fence, stream, token, foreign, idle = unpack(shown[i], 1, 5)
      local own = not foreign and fields[stream][text(fence)]
      items[i] = own and item_of(text(fence), own, records[i], stream == 's' and FRESH or AGAIN, priority, token, idle)
        or {text(fence)}
    end
    return items, all
  end
end

local function of_ends(is)
  local list = q.name .. LISTS[is]
  local function time_of(item) return tonumber((string.match(item, '^(%d+):'))) end
  local function time_at(index) return time_of(call('LINDEX', list, index)) end
  return function(from, n)
    local dropped, first, upto = tonumber(call('HGET', q.name, 'dropped' .. is)) or 0, 0, call('LLEN', list) - 1
    local position_in = from and math.min(tonumber(from), dropped + upto + 1)
    if newest then
      if not from and before then upto = number_before(before, upto + 1, time_at, newest) - 1 end
      upto = math.min(upto, position_in and position_in - dropped - 1 or upto)
      first = math.max(0, upto - n + 1)
    else
      if not from and since then first = number_before(since, upto + 1, time_at) end
      first = math.max(first, position_in and position_in - dropped + 1 or 0)
      upto = first + n - 1
    end
    local found = upto >= first and call('LRANGE', list, first, math.min(upto, first + budget - 1)) or {}
    local ids, items = {}, {}
    for i = 1, #found do ids[i] = string.match(found[i], ':(.*)$') or '' end
    local records = #ids > 0 and call('HMGET', q.name .. '/t', unpack(ids))
    for i = 1, #ids do
      local j = newest and #ids + 1 - i or i
      local r = not is_of_another(records[j]) and read_record(records[j])
      if not r or r.state ~= is or text(r.at) .. ':' .. ids[j] ~= found[j] then r = nil end -- the id was used again
      items[i] = {text(dropped + first + j - 1), ids[j], r, nil, nil, nil, nil, time_of(found[j])}
    end
    return items, newest and first == 0 or not newest and #ids < n
  end
end

local function of_tag(from, n)
  local name, low, high = q.name .. '/i', '[' .. wanted .. '\0', '(' .. wanted .. '\1'
  local members
  if newest then
    members = call('ZRANGE', name, from and '(' .. wanted .. '\0' .. from or high, low, 'BYLEX', 'REV', 'LIMIT', 0, n)
  else
    members = call('ZRANGE', name, from and '(' .. wanted .. '\0' .. from or low, high, 'BYLEX', 'LIMIT', 0, n)
  end
  local items = {}
  for i = 1, #members do
    local own = sub(members[i], #wanted + 2)
    local seq, id = string.match(own, '^(%d+)%z(.+)$')
    local r = id and tags.of(q, id) == seq and read_record(call('HGET', q.name .. '/t', id)) or nil
    local token, idle
    if r and r.state == WAITING and (r.place == FRESH or r.place == AGAIN) then
      token, idle = holder(stream_with(q, r), text(r.fence))
    end
    items[i] = {own, id, r, r and r.state == SCHEDULED and call('ZSCORE', q.name .. '/d', due_member(r, id)), token, nil, idle}
  end
  return items, #members < n
end

local names, pages = {}, {}
local function section(name, page)
  names[#names + 1], pages[name] = name, page
end

-- Returns the place of a section among others, which may not have it any more.
local function place_in_order(name)
  local stream, priority = string.match(name, '^(%a?)(%d?)$')
  return (not priority or priority == '') and 100 or 3 * (9 - priority) + (string.find('zrs', stream, 1, true) or 0)
end

if kind == 'waiting' then
  local in_lanes = tenant ~= '' and q.sorted and q.waiting <= q.laned + q.held -- all waiting entries are in lanes
  for priority = 9, 0, -1 do
    if string.find(q.lanes, priority, 1, true) then
      section('z' .. priority, of_set('/z' .. priority, WAITING, PARKED, priority))
      section('r' .. priority, of_stream('r', priority))
      section('s' .. priority, in_lanes and of_lane(priority) or of_stream('s', priority))
    end
  end
  section('J', of_set('/J', WAITING, HELD))
elseif kind == 'in_flight' then
  for priority = 9, 0, -1 do
    if string.find(q.lanes, priority, 1, true) then section(text(priority), of_flight(priority)) end
  end
elseif kind == 'tag' then
  section('tag', of_tag)
else
  local sets = {scheduled = {'/d', SCHEDULED, PARKED}, blocked = {'/blocked', BLOCKED, PARKED}, dead = {'/dead', DEAD, PARKED}}
  local ends = {done = DONE, expired = EXPIRED, cancelled = CANCELLED, discarded = DISCARDED}
  section(kind, sets[kind] and of_set(unpack(sets[kind])) or of_ends(ends[kind]))
end

-- Returns the position of the next page.
local function walk()
  local name, start = string.match(position, '^(%S+) (.*)$')
  local step, place = newest and -1 or 1, name and place_in_order(name)
  for i = newest and #names or 1, newest and 1 or #names, step do
    local own = place and place_in_order(names[i])
    local from, all = own == place and start or nil, place and (own - place) * step < 0 -- true if it was read before
    while not all and looked <= budget do
      local items
      local n = is_full() and 1 or math.min(at_once, budget - looked, filtered and budget or want - #answers + 1)
      items, all = pages[names[i]](from, n)
      for j = 1, #items do
        local own, id, r, due, token, size, idle, time = unpack(items[j], 1, 8)
        local early, late = time and since and time < since, time and before and time >= before
        if newest and early or late and not newest then return '' end -- so are all others
        if is_full() then return last end
        look(id, not early and not late and r, due, token, idle)
        from, bytes = own, bytes + (size or 0)
        if #own <= 420 then last = names[i] .. ' ' .. own end -- a longer one, of another program, is no position
      end
    end
  end
  return ''
end

local next_position = q.known and walk() or ''
return {answers, next_position, looked}

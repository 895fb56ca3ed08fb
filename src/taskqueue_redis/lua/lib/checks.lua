-- Checks some records and indexes of a queue. An index may have lost members because another program has deleted them,
-- or because it had a wrong type and was put aside; they are added again.

-- Returns whether a task is one that may hold an ordering key.
local function may_hold(q, entity, id)
  local r = id and found(q, id, call('HGET', q.name .. '/t', id))
  return r and is_live(r) and r.place ~= HELD and r.entity == entity
end

-- Checks a task that holds its ordering key, unless it waits for the key.
local function check_holder(q, id, r)
  local holder_id = call('HGET', q.name .. '/h', r.entity)
  if holder_id == id or may_hold(q, r.entity, holder_id) then return end
  call('HSET', q.name .. '/h', r.entity, id)
  note_damage(q, id)
end

-- Checks a waiting task in sorted lanes. Entries after the position of the consumer group are not sorted yet.
local function check_lane(q, id, r)
  if not call('ZSCORE', lane_of(q, r.priority, r.tenant), member_of(r)) then
    local name, fence = stream_with(q, r), text(r.fence)
    local fields = not holder(name, fence) and fields_at(name, fence)
    if not fields then return end -- in flight, or lost
    bytes = bytes + #fields[2]
    local after = string.match(last_delivered(name), '%d+')
    if fields[1] ~= id or r.fence > (tonumber(after) or 0) then return end
  elseif call('ZSCORE', q.name .. '/w' .. r.priority, r.tenant) and (flow_of(q).fair == 0
    or call('ZSCORE', q.name .. '/g' .. r.priority, r.tenant) or call('ZSCORE', q.name .. '/v', r.tenant)) then
    return
  end
  note_damage(q, id)
  enter_lane(q, r, r.place == AGAIN)
end

-- Puts a task back into the index that it has been lost from. Its body is in the hash of bodies.
local function put_in_index(q, id, r, body)
  bytes = bytes + 2 * #body
  note_damage(q, id)
  if r.state == SCHEDULED then
    local at, moved = r.attempt == 1 and header_of(body).not_before, read_cold(q, id).t -- the time of a retry is lost
    at = type(at) == 'number' and text(at * 1000000) or text(now)
    if type(moved) == 'table' and moved[1] == r.seq and tonumber(moved[2]) then at = moved[2] end
    call('ZADD', q.name .. '/d', at, due_member(r, id))
    index(q, '/d', ':due')
  elseif r.state == DEAD or r.state == BLOCKED then
    call('ZADD', q.name .. (r.state == DEAD and '/dead' or '/blocked'), text(r.state == DEAD and r.at or r.seq), id)
  elseif r.place == HELD then
    call('ZADD', q.name .. '/j:' .. r.entity, text(r.seq), id)
    call('ZADD', q.name .. '/J', text(r.seq), id)
  else
    call('ZADD', q.name .. '/z' .. r.priority, text(r.seq), id)
  end
end

-- Checks the unique key of a task that is live or a dead letter, in a queue that has such keys: its body has it, too.
local function check_key(q, id, r)
  local u = unique_of(q, id)
  if not u then
    local body = (r.place == FRESH or r.place == AGAIN) and body_at(stream_with(q, r), text(r.fence))
      or call('HGET', q.name .. '/b', id)
    local asked = body and header_of(body).unique
    if type(asked) ~= 'table' or type(asked.key) ~= 'string' then return end
    bytes = bytes + #body
    local period = type(asked.period) == 'number' and asked.period * 1000000 or nil
    claim(q, id, {k = asked.key, s = asked['until'] == 'started', p = period}, r.seq) -- the time of the publish is lost
    note_damage(q, id)
  elseif not call('ZSCORE', q.name .. '/U', u.key .. ' ' .. id) and holds(q, id, u) then
    retake(q, id)
    note_damage(q, id)
  end
end

-- Checks some unique keys. Those of tasks without records are deleted.
local function check_unique(q)
  local some = call('HRANDFIELD', q.name .. '/K', 20)
  for i = 1, #some do
    if not call('HGET', q.name .. '/t', some[i]) then disclaim(q, some[i]) end
  end
  some = call('ZRANDMEMBER', q.name .. '/U', 20)
  for i = 1, #some do
    local key, id = string.match(some[i], '^(%S+) (%S+)$')
    local u = id and unique_of(q, id)
    if not u or u.key ~= key then
      call('ZREM', q.name .. '/U', some[i])
      note_damage(q, id or '/')
    end
  end
end

-- Checks the tags of a task, in a queue with tags. If it is live or a dead letter, its body has them, too.
local function check_tags(q, id, r)
  local seq, _, packed = tags.of(q, id)
  if seq then
    if tags.index(q, id, packed) > 0 then note_damage(q, id) end
    return
  end
  local body = (r.place == FRESH or r.place == AGAIN) and body_at(stream_with(q, r), text(r.fence))
    or call('HGET', q.name .. '/b', id)
  local some, texts = body and header_of(body).tags, {}
  bytes = bytes + #(body or '')
  for i = 1, type(some) == 'table' and #some or 0 do texts[i] = type(some[i]) == 'string' and some[i] or nil end
  if #texts == 0 then return end
  tags.put(q, id, texts, r.seq) -- the time of the publish is lost
  note_damage(q, id)
end

-- Checks some tags. Those of tasks without records are deleted.
local function check_tagged(q)
  local some = call('HRANDFIELD', q.name .. '/I', 20)
  for i = 1, #some do
    if not call('HGET', q.name .. '/t', some[i]) then tags.drop(q, some[i]) end
  end
  some = call('ZRANDMEMBER', q.name .. '/i', 20)
  for i = 1, #some do
    local own, seq, id = string.match(some[i], '^([^%z]+)%z(%d+)%z(.+)$')
    local at, own_tags = tags.of(q, id or '')
    if not at or at ~= seq or not string.find(own_tags .. '\0', '\0' .. own .. '\0', 1, true) then
      call('ZREM', q.name .. '/i', some[i])
      note_damage(q, id or '/')
    end
  end
end

-- Looks at the parents of a blocked task again, because what it knew about them is lost.
local function begin_again(q, id, r)
  note_damage(q, id)
  local body = withdraw(q, r, id)
  if not body then return abandon(q, id) end
  call('UNLINK', q.name .. '/w:' .. id)
  if has(r, KEPT) then r.flags = r.flags - KEPT end
  waiting().admit(q, r, id, body)
  put_down(q, id, r)
  local name = q.key .. '/' .. id
  if header_of(body).batch == name and count_of(name).c then add_line('close', name, '-', {}) end
end

-- Checks a record.
local function check_record(q, id, packed)
  local r = read_record(packed)
  if r and (is_over(r) or has(r, STREAMS)) then check_types(streamed().of(q, ''), 'stream', {id}) end
  if r and is_over(r) then
    if r.at + math.max(q.window, q.keeps and setting(q, 'keep_ended', 0) or 0) + 600000000 < now and not call('ZSCORE', q.name .. '/k', id) then -- lost from the list of ends
      call('HDEL', q.name .. '/t', id)
      forget_rest(q, id)
      disclaim(q, id)
    elseif q.tagged then
      check_tags(q, id, r)
    end
    return
  end
  if r and (r.place == FRESH or r.place == AGAIN) then
    if q.sorted then check_lane(q, id, r) end
  elseif not (r and is_there(q, id, r) and (r.place ~= HELD or call('ZSCORE', q.name .. '/J', id))) then
    local at = place_of(q, id, packed)
    local body = not at and r and call('HGET', q.name .. '/b', id)
    if r and at and at[1] == r.state and at[2] == r.place then body = at[5] end -- one of two indexes has lost it
    if body then put_in_index(q, id, r, body) elseif at then r = rebuilt(q, id, unpack(at, 1, 7)) end
  end
  local s = r and r.state == BLOCKED and unpack_wait(call('HGET', q.name .. '/w:' .. id, 'state'))
  if s and waiting().list_held(q, id, s) then note_damage(q, id) end
  if s then waiting().ask_again(q, id, s) elseif r and r.state == BLOCKED then begin_again(q, id, r) end
  if r and q.keyed then check_key(q, id, r) end
  if r and q.tagged then check_tags(q, id, r) end
  if not r or r.entity == '' or not is_live(r) then return end
  if r.place == HELD then
    -- Without a holder, the task is released by `check_keys`.
    if call('HSETNX', q.name .. '/h', r.entity, id) == 1 then note_damage(q, id) end
  elseif r.state ~= BLOCKED and (r.state == WAITING or r.attempt > 1) then
    check_holder(q, id, r)
  end
end

-- Checks members of a sorted set. A member without a task is removed.
local function check_members(q, set, state, place)
  local some = call('ZRANDMEMBER', q.name .. set, 20)
  for i = 1, #some do
    local id = set == '/d' and sub(some[i], 18) or some[i]
    local r = read_record(call('HGET', q.name .. '/t', id))
    if not (r and r.state == state and r.place == place and (set ~= '/d' or due_member(r, id) == some[i])) then
      local body = call('HGET', q.name .. '/b', id)
      if body and not (r and not is_over(r) and is_there(q, id, r)) then
        record_at(q, id, state, place, nil, set == '/d' and sub(some[i], 1, 17) or call('ZSCORE', q.name .. set, id), body)
      else
        call('ZREM', q.name .. set, some[i])
        note_damage(q, id)
      end
    end
  end
  if set == '/d' then index(q, '/d', ':due') end
end

-- Deletes some texts of lines that another program has removed from the outbox.
local function check_lines()
  local names = call('HRANDFIELD', LINES, 20)
  for i = 1, #names do
    if not call('ZSCORE', OUTBOX, names[i]) and not call('ZSCORE', ENDS, names[i]) then
      call('HDEL', LINES, names[i])
      call('HINCRBY', META, 'anomalies', 1)
    end
  end
end

-- Checks whether the settings of a queue agree with their copy. The caller of maintenance applies them again if not.
local function check_settings(q)
  local kept = call('HMGET', q.name, 'settings', 'copied')
  local lost = flow_of(q).weighted > 0 and call('EXISTS', q.name .. '/W') == 0 -- of tenants: weights, and who is paused
  if kept[1] == kept[2] and not lost then return end
  if kept[2] or lost then note_damage(q, '/') else call('HSET', q.name, 'copied', kept[1]) end -- stored by an earlier version
end

-- Checks some ordering keys. Passes a key on if its holder cannot hold it.
local function check_keys(q)
  local some = call('HRANDFIELD', q.name .. '/h', 20, 'WITHVALUES')
  for i = 1, #some, 2 do
    if not may_hold(q, some[i], some[i + 1]) then
      call('HINCRBY', META, 'anomalies', 1)
      release(q, {entity = some[i]}, some[i + 1])
    end
  end
end

-- Checks some tasks that a dead letter holds. One that is not blocked is removed from their index.
local function check_held(q)
  local some = call('ZRANDMEMBER', q.name .. '/blocked_on_dead', 20)
  for i = 1, #some do
    if not call('ZSCORE', q.name .. '/blocked', some[i]) then
      call('ZREM', q.name .. '/blocked_on_dead', some[i])
      note_damage(q, some[i])
    end
  end
end

-- Checks some records of a queue, continuing where the last call ended: more of them if it found damage, and fewer if
-- their bodies are large. Returns how many.
local function check_some(q)
  local cursor, count = string.match(call('HGET', q.name, 'check') or '', '^(%d+):(%d+)$')
  local page = call('HSCAN', q.name .. '/t', cursor or '0', 'COUNT', count or '50')
  local records, at = page[2], 1
  local before = noted_damages
  q.keyed = call('HGET', q.name, 'unique')
  if q.keyed then check_unique(q) end
  q.tagged = call('HGET', q.name, 'tagged')
  if q.tagged then check_tagged(q) end
  while at <= #records and bytes < BYTES do
    check_record(q, records[at], records[at + 1])
    at = at + 2
  end
  check_members(q, '/d', SCHEDULED, PARKED)
  check_members(q, '/dead', DEAD, PARKED)
  check_members(q, '/blocked', BLOCKED, PARKED)
  check_members(q, '/J', WAITING, HELD)
  check_held(q)
  local found_some = noted_damages > before
  local next = (at > #records and page[1] or cursor or '0') .. ':' .. (found_some and '500' or page[1] == '0' and '50' or count or '50')
  if next ~= '0:50' then
    call('HSET', q.name, 'check', next)
  elseif cursor then
    call('HDEL', q.name, 'check')
  end
  return (at - 1) / 2
end

--@ base room life queue states journal / states record counts streams flow tenants lanes cold kin damage places events ends after returns promote turns sorting timing
-- Delivers up to `limit` tasks, and at most 500, from the keys of a consumer. Delivers fewer if their bodies are large.
-- ARGV: token, turn, limit, "1" to check the other keys for work in any case, then the keys that probably have work, in
-- the order of their turns.
-- Returns the time; the next due time of the partition ("" for none); whether there is more; the expired tasks as {key,
-- id, attempt}; per queue and lane {key, lane, entries, timeout of an attempt ("" for none), the inputs of tasks that have
-- some, as {position of its entry, inputs}}; the requested or served keys that have work left; other keys that have work;
-- and the keys that are stopped by a limit, each with the time at which the limit may allow deliveries ("" if only an
-- event can). An entry consists of sequence number, id, body and counters ("" for none).
local token, turn, limit, look = ARGV[3], tonumber(ARGV[4]), math.min(tonumber(ARGV[5]), 500), ARGV[6] == '1'
local EXPIRED_AT_MOST = 250
local current_turn = tonumber(call('HGET', PARTITION .. ':c:' .. token, 'turn'))
if not current_turn then return redis.error_reply('TQ GONE no such consumer') end
if turn < current_turn then return redis.error_reply('TQ LATE the caller has given this receive up') end
lift_refusal()
sign_of_life(token)
local due = call('ZRANGE', PARTITION .. ':due', 0, 0, 'WITHSCORES')
if due[2] and tonumber(due[2]) <= now then
  rarely().promote_due(250)
  save_all()
  bytes = 0
  due = call('ZRANGE', PARTITION .. ':due', 0, 0, 'WITHSCORES')
end

local expired, groups = {}, {}
local full = false -- whether the rest is left to the next call
local worker = nil

-- Ends a task that is past its deadline. Returns whether further tasks must wait for the next call.
local function expire(q, id, r, name, fence, size)
  local rare = rarely()
  rare.drop_entry(q, name, fence)
  rare.uncount_fresh(q, r)
  rare.finish(q, r, id, EXPIRED, 'expired')
  rare.put_down(q, id, r)
  note(q, 'expired', id, r, 'expired')
  expired[#expired + 1] = {q.key, id, r.attempt}
  q.waiting = q.waiting - 1
  bytes = bytes + size
  full = full or #expired >= EXPIRED_AT_MOST or bytes >= BYTES
  return full
end

local function hand_out(q, lane, given, inputs)
  local n = #given / 4
  if n == 0 then return 0 end
  groups[#groups + 1] = {q.key, lane, given, q.limited and rarely().timeout_of(q) or '', inputs}
  if not q.sorted then
    call('HSET', q.name, lane, given[4 * n - 3])
  elseif q.limited then
    rarely().note_flying(q, given)
  end
  q.waiting, q.in_flight, q.delivered = q.waiting - n, q.in_flight + n, q.delivered + n
  if q.timed then rarely().note_start(q, lane, given) end
  if q.journal then
    worker = worker or worker_of(q, token)
    noting().given(q, sub(lane, 2), given, worker)
  end
  return n
end

-- Adds entries to the answer, except those past their deadline. Returns how many were added.
local function give(q, lane, name, entries)
  local given, n, inputs = {}, 0, {}
  for i = 1, #entries do
    local fence, fields = entries[i][1], entries[i][2]
    local id, more = fields[1], fields[4]
    if not more or fields[3] == 'more' then q.fresh = q.fresh - 1 end
    local deadline = more and tonumber(string.match(more, '%d*$'))
    local r = deadline and deadline <= now and rarely().record_of_entry(q, id, sub(fence, 1, -3))
    if r then
      expire(q, id, r, name, fence, #fields[2])
    else
      given[n + 1], given[n + 2], given[n + 3], given[n + 4] = sub(fence, 1, -3), id, fields[2], more or ''
      n = n + 4
      if more and fields[5] then inputs[#inputs + 1] = {n / 4, rarely().inputs_of(q, id)} end
      bytes = bytes + #fields[2]
    end
  end
  full = full or bytes >= BYTES
  return hand_out(q, lane, given, inputs)
end

local doubtful = {} -- queues whose counters may differ from their data

local function read(q, name, count)
  -- A read that finds no entry may also make the consumer a member of the group.
  call('SADD', PARTITION .. ':o:' .. token, sub(name, -2) .. q.key)
  local answer = redis.pcall('XREADGROUP', 'GROUP', 'g', token, 'COUNT', count, 'STREAMS', name, '>')
  if answer and answer.err then
    if not string.find(answer.err, 'NOGROUP', 1, true) then error(answer) end
    call('XGROUP', 'CREATE', name, 'g', '0', 'MKSTREAM')
    doubtful[q] = true
    answer = call('XREADGROUP', 'GROUP', 'g', token, 'COUNT', count, 'STREAMS', name, '>')
  end
  return answer and answer[1][2] or {}
end

-- Redelivered entries come first in their lane, by their old positions. Each becomes a new entry of a stream.
local function serve_returned(q, priority, count)
  local popped = call('ZPOPMIN', q.name .. '/z' .. priority, count)
  local name = stream_of(q, 'r', priority)
  for i = 1, #popped, 2 do
    local id = popped[i]
    local body = rarely().drop_body(q, id)
    if body then
      local r = rarely().record_at(q, id, WAITING, PARKED, priority, popped[i + 1], body)
      r.place, r.fence = AGAIN, next_seq(q)
      bytes = bytes + #body -- it is moved here, and read again by `give`
      rarely().enter_stream(q, r, id, body, rarely().deadline_of(q, id))
      rarely().put_down(q, id, r)
    else
      rarely().abandon(q, id)
      q.waiting = q.waiting - 1
    end
  end
  q.back = q.back - #popped / 2
  bytes = bytes + 4096 * #popped -- because the commands take time as well
  return give(q, 'r' .. priority, name, read(q, name, count))
end

local function serve_class(q, priority, want)
  local served = 0
  if q.sorted then
    while served < want and not full and q.laned > 0 do
      local runs = rarely().line_up(q, priority, math.min(want - served, q.at_once or AT_ONCE), token, expire)
      full = full or q.looked >= 500
      if not runs then break end
      for i = 1, #runs do
        local lane, count, entries = unpack(runs[i])
        if #entries < count then doubtful[q] = true end
        served = served + give(q, lane, q.name .. '/' .. lane, entries)
      end
    end
    return served
  end
  local some = q.back > 0 and call('HGET', q.name, 'large') and 4 or AT_ONCE
  while served < want and not full and q.back > 0 do
    local before = #expired
    local n = serve_returned(q, priority, math.min(want - served, some))
    if n == 0 and #expired == before then break end
    served = served + n
  end
  local name = stream_of(q, 's', priority)
  while served < want and not full do
    local count = math.min(want - served, q.at_once or AT_ONCE)
    local entries = read(q, name, count)
    served = served + give(q, 's' .. priority, name, entries)
    if #entries < count then break end
  end
  return served
end

local function serve(q, want)
  if want > AT_ONCE and not q.at_once then
    local costly = call('HGET', q.name, 'large') or q.extras and call('EXISTS', q.name .. '/e') == 1
    q.at_once = costly and AT_ONCE or want -- entries per read
  end
  if q.sorted and q.waiting > q.laned + q.held then q.sorting = rarely().sort_some(q, 250) > 0 end
  full = full or bytes >= BYTES
  if q.limited and rarely().flow_of(q).floor > 0 then return rarely().serve_floor(q, want, serve_class) end
  local served = 0
  for i = 1, #q.lanes do served = served + serve_class(q, sub(q.lanes, i, i), want - served) end
  return served
end

-- A queue that is stopped by a limit is read again after a notification, or when the limit may allow deliveries.
local closed, unfinished = {}, {}
local function is_open(q)
  if not q.limited then return true end
  local opens_at
  q.room, opens_at = rarely().room(q)
  local open = q.room > 0
  if open and q.sorted then open, opens_at = rarely().servable(q) end
  if open then return true end
  if q.looked >= 500 then -- the next call looks at further tenants
    unfinished[#unfinished + 1] = q.key
    return false
  end
  closed[#closed + 1] = {q.key, opens_at and text(opens_at) or ''}
  return false
end

local candidates, seen, others = {}, {}, {}
local function consider(key)
  if seen[key] then return end
  seen[key] = true
  local q = queue(key)
  if q.waiting > q.held and is_open(q) then candidates[#candidates + 1] = q end
end
local asked, most = 7, math.min(limit, 200)
while asked <= #ARGV and #candidates < most do
  consider(ARGV[asked])
  asked = asked + 1
end
for i = asked, #ARGV do -- too many for one call
  seen[ARGV[i]] = true
  unfinished[#unfinished + 1] = ARGV[i]
end
if look or #candidates < most then
  local ready = call('SINTER', PARTITION .. ':ready', PARTITION .. ':k:' .. token)
  for i = 1, #ready do
    if #candidates < most then
      consider(ready[i])
    elseif not seen[ready[i]] then
      others[#others + 1] = ready[i]
    end
  end
end

-- Each queue gets an equal share of the limit; what a queue does not use is given to the other queues.
local left, round = limit, 1
while left > 0 and #candidates > 0 and not full and round <= 3 do
  local again, unserved, share = {}, {}, math.max(1, floor(left / #candidates))
  for i = 1, #candidates do
    local q = candidates[i]
    local want = math.min(left, share, q.room or left)
    local skip = full or want <= 0
    local n = skip and 0 or serve(q, want)
    left = left - n
    if q.limited then rarely().take_tokens(q, n) end
    if skip then
      unserved[#unserved + 1] = q
    elseif q.waiting > q.held and is_open(q) then
      local sorting = q.sorting and q.waiting > q.laned + q.held -- the entries that may be delivered are perhaps not sorted yet
      if n == want or full or sorting then again[#again + 1] = q else doubtful[q] = true end
    end
  end
  for i = 1, #again do unserved[#unserved + 1] = again[i] end
  candidates = unserved -- first the queues that had no turn
  round = round + 1
end
local leftover = unfinished
for i = 1, #candidates do leftover[#leftover + 1] = candidates[i].key end
save_all()
for q in pairs(doubtful) do rarely().recount(q) end
if next(doubtful) then save_all() end
local more = #leftover > 0 or #others > 0 or (left > 0 and #expired > 0)
return {text(now), due[2] or '', more and 1 or 0, expired, groups, leftover, others, closed}

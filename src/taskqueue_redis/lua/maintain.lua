--@ base room life queue states record counts streams flow tenants lanes cold kin damage journal places events ends after promote returns timing unique history / states removal types checks schedules
-- One run of maintenance, with a limited amount of work. Several processes may run it at the same time.
-- ARGV: microseconds after which a silent consumer's lease expires, usual interval between two runs, budget of each
-- kind of work, milliseconds after which an unregistered member without deliveries is removed, calling process.
-- Returns how many tasks were promoted, the expired tasks as {key, id, attempt}, how many were deleted and recovered,
-- the number of anomalies so far, consumers whose lease has expired as {token, worker}, queues with waiting tasks but
-- no consumer ("" if not checked), how often the clock of Redis was set back so far and by how many microseconds the
-- last time, for how many microseconds the work that is left has been due ("" if none is left), how many microseconds
-- this run took if the caller should continue ("" otherwise; 0 if it has just caught up), the names of damaged tasks
-- as "queue task" (instead of the task, "/" stands for the counters or limits of the queue), and how many queues were
-- removed.
local lease, period, budget, process = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[7]
local timed, started = pcall(function() return os.clock() end) -- TIME does not change during a script
lift_refusal()

-- If maintenance has not run for a while, every consumer gets a whole lease before its deliveries are taken back.
local real = store_time()
local armed, others, continues, was_behind, checks
do -- this file has `do` blocks, because Lua limits the number of local variables
  local guard = call('HMGET', META, 'swept', 'armed', 'sweeper', 'checked')
  armed = tonumber(guard[2]) or real
  if real - (tonumber(guard[1]) or 0) > 3 * period or not guard[2] then
    armed = real
    call('HSET', META, 'armed', text(real))
  end
  call('HSET', META, 'swept', text(real))

  -- One process continues while work is left; the others run at their usual interval.
  local sweeper, ends_at, behind = string.match(guard[3] or '', '^(.*):(%d+):(%d)$')
  local claimed = sweeper and tonumber(ends_at) >= real
  others, continues, was_behind = claimed and sweeper ~= process, claimed and sweeper == process, behind
  checks = not continues or real - (tonumber(guard[4]) or 0) >= period
end

local promoted = promote_due(budget)

local expired = {}
do
  local late = call('ZRANGEBYSCORE', PARTITION .. ':deadlines', '-inf', text(now), 'LIMIT', 0, budget)
  for i = 1, #late do
    local q = queue(late[i])
    local ids = call('ZRANGEBYSCORE', q.name .. '/e', '-inf', text(now), 'LIMIT', 0, budget - #expired)
    for j = 1, #ids do
      local r = found(q, ids[j], call('HGET', q.name .. '/t', ids[j]))
      if r and is_live(r) then
        end_live(q, ids[j], r, EXPIRED, 'expired')
        expired[#expired + 1] = {q.key, ids[j], r.attempt}
      else -- the record is damaged; the task is found by its entry
        call('ZREM', q.name .. '/e', ids[j])
      end
    end
    index(q, '/e', ':deadlines')
    if #expired >= budget then break end
  end
end

local recovered, dead, silent, rest = 0, {}, {}, budget
if real - armed > lease then
  silent = call('ZRANGEBYSCORE', PARTITION .. ':alive', '-inf', text(real - lease), 'LIMIT', 0, 100)
  for i = 1, #silent do
    local worker = call('HGET', PARTITION .. ':c:' .. silent[i], 'worker') or ''
    local taken_back, all
    taken_back, rest, all = take_back(silent[i], true, rest)
    recovered = recovered + taken_back
    if all then dead[#dead + 1] = {silent[i], worker} end
    if rest <= 0 or bytes >= BYTES then break end
  end
end

recovered = recovered + end_hung(budget)

-- `ends`: when the tasks ended, according to the list of ends; nil for tasks whose results have expired, because a task
-- that has a result is skipped in that list.
local forgotten = 0
do
  local function forget(q, ids, ends)
    if #ids == 0 then return end
    local records, over = call('HMGET', q.name .. '/t', unpack(ids)), {}
    local results, unique = call('EXISTS', q.name .. '/k') == 1, call('EXISTS', q.name .. '/K') == 1
    local tagged, heads = call('EXISTS', q.name .. '/I') == 1, {}
    for i = 1, #ids do
      local r = read_record(records[i])
      if records[i] and not r then
        over[#over + 1] = ids[i] -- the record is damaged
      elseif r and is_over(r) and (not ends or r.at == ends[i]) and not (results and call('ZSCORE', q.name .. '/k', ids[i])) then
        local u = unique and unique_of(q, ids[i])
        local till = math.max(u and u.till or 0, ends and 0 or r.at + q.window) -- the window may be longer than it was
        if not ends and r.at + (kept_of(q)) > now and is_listed(heads, q, r, ids[i], budget) then
          -- it is forgotten when its turn in the list comes
        elseif now < till then -- kept as long as a result would be
          call('ZADD', q.name .. '/k', text(till), ids[i])
          index(q, '/k', ':results')
        else
          over[#over + 1] = ids[i]
        end
      end
    end
    if #over == 0 then return end
    forgotten = forgotten + call('HDEL', q.name .. '/t', unpack(over))
    call('HDEL', q.name .. '/x', unpack(over))
    call('HDEL', q.name .. '/p', unpack(over))
    for i = 1, unique and #over or 0 do disclaim(q, over[i]) end
    for i = 1, tagged and #over or 0 do tags.drop(q, over[i]) end
  end

  local old = call('ZRANGEBYSCORE', PARTITION .. ':results', '-inf', text(now), 'LIMIT', 0, budget)
  local looked = 0
  for i = 1, #old do
    local q = queue(old[i])
    local ids = call('ZRANGEBYSCORE', q.name .. '/k', '-inf', text(now), 'LIMIT', 0, budget - looked)
    if #ids > 0 then
      call('ZREM', q.name .. '/k', unpack(ids))
      call('HDEL', q.name .. '/o', unpack(ids))
      forget(q, ids)
    end
    looked = looked + #ids
    index(q, '/k', ':results')
    if looked >= budget then break end
  end

  looked = 0
  local ended = call('ZRANGEBYSCORE', PARTITION .. ':forget', '-inf', text(now), 'LIMIT', 0, budget)
  for i = 1, #ended do
    local q = queue(ended[i])
    for state in pairs(LISTS) do
      if looked < budget then
        local ids, ends = outlived(q, state, budget - looked)
        forget(q, ids, ends)
        drop_ends(q, state, #ids)
        looked = looked + #ids
      end
    end
    look_later(q)
    if looked >= budget then break end
  end
end

local looked = 0 -- number of records that were checked

-- Checks a queue for inconsistencies that other programs or missing rights can cause: members that indexes have lost,
-- wrong counters, unknown members of its groups.
local function check(q)
  local removed = 0
  if rarely().check_queue_types(q.name, 20) then note_damage(q, '/') end
  if looked < 500 then looked = looked + rarely().check_some(q) end
  rarely().check_settings(q)
  recount(q)
  if q.waiting > q.held then call('SADD', PARTITION .. ':ready', q.key) end -- an earlier script may have failed
  call('ZADD', PARTITION .. ':idle', 'NX', text(now + QUEUE_TTL), q.key) -- an earlier version created the queue
  if q.sorted then rarely().check_keys(q) end
  for i = 1, #q.lanes do
    for _, kind in ipairs({'s', 'r'}) do
      local name = stream_of(q, kind, sub(q.lanes, i, i))
      local members = of_group('XINFO', 'CONSUMERS', name, 'g') or {}
      for j = 1, #members do
        local token, pending, idle = members[j][2], members[j][4], members[j][6]
        if pending == 0 and idle > tonumber(ARGV[6]) and not call('ZSCORE', PARTITION .. ':alive', token) then
          if removed == budget then return end
          call('XGROUP', 'DELCONSUMER', name, 'g', token)
          removed = removed + 1
        end
      end
    end
  end
end

-- Returns for how long the work that is left has been due.
local function lateness()
  local late
  local function due(at, time) if at and tonumber(at) <= time then late = math.max(late or 0, time - at) end end
  for _, name in ipairs({':due', ':deadlines', ':results', ':forget', ':processing', ':idle'}) do
    due(call('ZRANGE', PARTITION .. name, 0, 0, 'WITHSCORES')[2], now)
  end
  if #silent > 0 then
    local beat = call('ZRANGE', PARTITION .. ':alive', 0, 0, 'WITHSCORES')[2]
    due(beat and math.max(beat, armed) + lease, real)
  end
  return late
end

local unclaimed = ''
if checks then
  call('HSET', META, 'checked', text(real))
  rarely().check_partition_types(20)
  forget_batches()
  rarely().check_lines()
  rarely().check_schedules()
  local some = call('SRANDMEMBER', PARTITION .. ':queues', 8)
  for i = 1, #some do check(queue(some[i])) end
end
local removed = rarely().remove_idle(100)
save_all()
if checks then
  unclaimed = {}
  local ready = call('SRANDMEMBER', PARTITION .. ':ready', 1000)
  local claims = #ready > 0 and call('HMGET', PARTITION .. ':subs', unpack(ready))
  for i = 1, #ready do
    if not claims[i] then unclaimed[#unclaimed + 1] = ready[i] end
  end
end

local behind, took = lateness(), ''
if not others and (behind or continues and was_behind == '1') then
  local done = promoted + #expired + recovered + forgotten
  took = timed and (os.clock() - started) * 1000000 or 20 * done -- Redis before 7.4 has no such clock
  took = behind and text(math.ceil(took)) or '0'
  call('HSET', META, 'sweeper', process .. ':' .. text(real + 4 * took + 2000000) .. (behind and ':1' or ':0'))
elseif continues then
  call('HDEL', META, 'sweeper')
end
local seen = call('HMGET', META, 'anomalies', 'steps', 'step')
local damaged = call('LRANGE', PARTITION .. ':damaged', 0, budget - 1)
if #damaged > 0 then call('LTRIM', PARTITION .. ':damaged', #damaged, -1) end
return {promoted, expired, forgotten, recovered, seen[1] or '0', dead, unclaimed, seen[2] or '0', seen[3] or '0',
  behind and text(behind) or '', took, damaged, removed}

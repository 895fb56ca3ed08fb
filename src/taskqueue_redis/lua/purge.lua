--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events ends after sorting
-- Ends waiting, scheduled and blocked tasks as cancelled, a limited number per call. Tasks that are published after the
-- first call are not included. Until the last call, scheduled tasks that become due are ended by `promote`.
-- ARGV: key, position ("" for the first call), budget.
-- Returns the number of ended tasks, whether none is left, and the position: the highest sequence number, and the first
-- due time to look at.
local q, budget = queue(ARGV[3]), tonumber(ARGV[5])
local upto, from = string.match(ARGV[4], '^(%d+):(.*)$')
upto, from = tonumber(upto) or q.last, from or '-inf'
local purged, more, torn = 0, false, false
lift_refusal()
local mark = string.match(call('HGET', q.name, 'purging') or '', '^%d+')
mark = math.max(tonumber(mark) or 0, upto) -- another purge may have begun later
if q.sorted and q.waiting > q.laned + q.held then
  torn = sort_some(q, budget) == 0
  more = not torn
end

local function left() return budget > 0 and bytes < BYTES end

-- `state`, `place`, `priority` and `seq`: where the entry of the task is.
local function purge(id, body, state, place, priority, seq)
  local r = record_at(q, id, state, place, priority, seq, place < PARKED and body)
  end_live(q, id, r, CANCELLED, 'cancelled')
  purged, budget, bytes = purged + 1, budget - 1, bytes + #body
end

local function purge_stream(priority)
  local name = stream_of(q, 's', priority)
  local after = last_delivered(name)
  while budget > 0 and bytes < BYTES do
    local entries = call('XRANGE', name, after, text(upto), 'COUNT', math.min(budget, 10))
    if #entries == 0 then break end
    for i = 1, #entries do
      local fields = entries[i][2]
      if left() then purge(fields[1], fields[2], WAITING, FRESH, priority, sub(entries[i][1], 1, -3)) end
    end
  end
end

local function first_of(name)
  if not left() then return {} end
  return call('ZRANGEBYSCORE', name, '-inf', text(upto), 'LIMIT', 0, budget)
end

local function purge_set(set, place, priority)
  local ids = first_of(set)
  for j = 1, #ids do purge(ids[j], '', WAITING, place, priority, 0) end
end

local function purge_lane(priority, tenant)
  local name = lane_of(q, priority, tenant)
  local members = first_of(name)
  for j = 1, #members do
    if not left() then return end
    local kind, fence = sub(members[j], 1, 1), sub(members[j], 2)
    local fields = fields_at(stream_of(q, kind, priority), fence)
    if fields then
      purge(fields[1], fields[2], WAITING, kind == 's' and FRESH or AGAIN, priority, fence)
    else -- another program has deleted the entry
      call('ZREM', name, members[j])
      torn, budget = true, budget - 1
    end
  end
  if call('EXISTS', name) == 0 then leave_walk(q, priority, tenant) end
  budget = budget - 1
end

purge_set(q.name .. '/J', HELD) -- first, because the end of a key's holder would make these tasks available
for i = 1, #q.lanes do
  local priority = sub(q.lanes, i, i)
  purge_set(q.name .. '/z' .. priority, PARKED, priority)
  if not q.sorted then purge_stream(priority) end
  local tenants = first_of(q.name .. '/w' .. priority)
  for j = 1, #tenants do
    if left() then purge_lane(priority, tenants[j]) end
  end
end

-- Members with the same due time are sorted by their sequence numbers, so after one that is too new, all are too new.
if left() then
  local members = call('ZRANGEBYSCORE', q.name .. '/d', from, '+inf', 'WITHSCORES', 'LIMIT', 0, budget)
  for i = 1, #members, 2 do
    if tonumber(sub(members[i], 1, 17)) <= upto then
      purge(sub(members[i], 18), '', SCHEDULED, PARKED, nil, sub(members[i], 1, 17))
    else
      from, budget = '(' .. members[i + 1], budget - 1
    end
  end
end
for _, id in ipairs(first_of(q.name .. '/blocked')) do
  if left() then purge(id, '', BLOCKED, PARKED, nil, 0) end
end
if torn then recount(q) end
local done = left() and not more
if done and mark == upto then
  call('HDEL', q.name, 'purging')
elseif not done and call('EXISTS', q.name .. '/d', q.name .. '/blocked') > 0 then
  call('HSET', q.name, 'purging', text(mark) .. ':' .. text(now))
end
purged = purged + (tonumber(call('HGET', q.name, 'purged')) or 0)
call('HDEL', q.name, 'purged')
save_all()
return {purged, done and 1 or 0, text(upto) .. ':' .. from}

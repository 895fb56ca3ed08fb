--@ base room queue states record counts streams flow tenants lanes journal places ends sorting
-- Ends waiting and scheduled tasks as cancelled, a limited number per call. Tasks that are published after the
-- first call are not included.
-- ARGV: key, highest sequence number ("" for all tasks until now), maximum number.
-- Returns the number of ended tasks, whether none is left, and the highest sequence number.
local q, budget = queue(ARGV[3]), tonumber(ARGV[5])
local upto = tonumber(ARGV[4]) or q.last
local purged, more, torn = 0, false, false
lift_refusal()
if q.sorted and q.waiting > q.laned + q.held then
  torn = sort_some(q, budget) == 0
  more = not torn
end

local function purge(id)
  local r = read_record(call('HGET', q.name .. '/t', id))
  end_live(q, id, r, CANCELLED, 'cancelled')
  purged = purged + 1
end

local function purge_stream(name)
  local entries = call('XRANGE', name, last_delivered(name), text(upto), 'COUNT', budget - purged)
  for i = 1, #entries do purge(entries[i][2][1]) end
end

local function first_of(name)
  if purged >= budget then return {} end
  return call('ZRANGEBYSCORE', name, '-inf', text(upto), 'LIMIT', 0, budget - purged)
end

local function purge_set(set)
  local ids = first_of(set)
  for j = 1, #ids do purge(ids[j]) end
end

local function purge_lane(priority, tenant)
  local name = lane_of(q, priority, tenant)
  local members = first_of(name)
  for j = 1, #members do
    local fields = fields_at(stream_of(q, sub(members[j], 1, 1), priority), sub(members[j], 2))
    if fields then
      purge(fields[1])
    else -- another program has deleted the entry
      call('ZREM', name, members[j])
      torn = true
    end
  end
  if call('EXISTS', name) == 0 then leave_walk(q, priority, tenant) end
end

purge_set(q.name .. '/J') -- first, because the end of a key's holder would make these tasks available
for i = 1, #q.lanes do
  local priority = sub(q.lanes, i, i)
  purge_set(q.name .. '/z' .. priority)
  if not q.sorted and purged < budget then purge_stream(q.name .. '/s' .. priority) end
  local tenants = call('ZRANGEBYSCORE', q.name .. '/w' .. priority, '-inf', text(upto), 'LIMIT', 0, budget)
  for j = 1, #tenants do purge_lane(priority, tenants[j]) end
  more = more or #tenants == budget
end
if purged < budget then
  local members = call('ZRANGE', q.name .. '/d', 0, budget - purged - 1)
  for i = 1, #members do
    if tonumber(sub(members[i], 1, 17)) <= upto then purge(sub(members[i], 18)) end
  end
end
if torn then recount(q) end
save_all()
return {purged, purged < budget and not more and 1 or 0, text(upto)}

--@ base room queue states record counts journal places ends
-- Ends waiting and scheduled tasks as cancelled, a bounded number of those that were there at a time.
-- ARGV: key, the highest sequence to touch ("" for all until now), the most to end.
-- Answers how many, whether that was all, and the highest sequence.
local q, budget = queue(ARGV[3]), tonumber(ARGV[5])
local upto = tonumber(ARGV[4]) or q.last
local purged = 0
lift_refusal()

local function purge(id)
  local r = read_record(call('HGET', q.name .. '/t', id))
  end_live(q, id, r, CANCELLED, 'cancelled')
  purged = purged + 1
end

local function purge_stream(name)
  local group = redis.pcall('XINFO', 'GROUPS', name)
  if group.err or not group[1] then return end
  local last = '-'
  for i = 1, #group[1], 2 do
    if group[1][i] == 'last-delivered-id' then last = '(' .. group[1][i + 1] end
  end
  local entries = call('XRANGE', name, last, text(upto), 'COUNT', budget - purged)
  for i = 1, #entries do purge(entries[i][2][1]) end
end

for i = 1, #q.lanes do
  local priority = string.sub(q.lanes, i, i)
  if purged < budget then
    local ids = call('ZRANGEBYSCORE', q.name .. '/z' .. priority, '-inf', text(upto), 'LIMIT', 0, budget - purged)
    for j = 1, #ids do purge(ids[j]) end
  end
  if purged < budget then purge_stream(q.name .. '/s' .. priority) end
end
if purged < budget then
  local members = call('ZRANGE', q.name .. '/d', 0, budget - purged - 1)
  for i = 1, #members do
    if tonumber(string.sub(members[i], 1, 17)) <= upto then purge(string.sub(members[i], 18)) end
  end
end
save_all()
return {purged, purged < budget and 1 or 0, text(upto)}

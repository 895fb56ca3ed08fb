--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events unique removal
-- Deletes a queue that has no tasks and no subscriptions, with its settings and the records of its ended tasks.
-- Deletes a limited number of records per call.
-- ARGV: key, maximum number, the default settings as JSON.
-- Returns 1 if the queue existed, 0 if not; how many records were deleted; whether none is left; the numbers of `uses`
-- (unless all are 0, nothing was deleted).
local q, budget = queue(ARGV[3]), tonumber(ARGV[4])
lift_refusal()
if not q.known then return {0, 0, 1, {0, 0, 0, 0, subscribers(q), 0}} end
local used, total = uses(q), 0
for i = 1, #used do total = total + used[i] end
if total > 0 then
  save_all()
  return {1, 0, 1, used}
end

local forgotten, unique, tagged = 0, call('EXISTS', q.name .. '/K') == 1, call('EXISTS', q.name .. '/I') == 1
local function forget(ids)
  if #ids == 0 then return end
  forgotten = forgotten + call('HDEL', q.name .. '/t', unpack(ids))
  call('HDEL', q.name .. '/x', unpack(ids))
  call('HDEL', q.name .. '/p', unpack(ids))
  call('HDEL', q.name .. '/o', unpack(ids))
  call('ZREM', q.name .. '/k', unpack(ids))
  for i = 1, unique and #ids or 0 do disclaim(q, ids[i]) end
  for i = 1, tagged and #ids or 0 do tags.drop(q, ids[i]) end
  for i = 1, #ids do
    local name = streamed().of(q, ids[i])
    call('UNLINK', name)
  end
end

for _, list in pairs(LISTS) do
  local ids = budget > 0 and call('LRANGE', q.name .. list, 0, budget - 1) or {}
  for i = 1, #ids do ids[i] = string.match(ids[i], ':(.*)$') or '' end
  forget(ids)
  if #ids > 0 then call('LTRIM', q.name .. list, #ids, -1) end
  budget = budget - #ids
end
if budget > 0 then forget(call('ZRANGE', q.name .. '/k', 0, budget - 1)) end
local left = call('EXISTS', q.name .. '/k') > 0
for _, list in pairs(LISTS) do left = left or call('EXISTS', q.name .. list) == 1 end
if left then
  index(q, '/k', ':results')
else
  if q.journal then
    noting().note(q, 'configured', '', {attempt = 0, losses = 0, priority = 0}, '', nil, nil, ARGV[5])
  end
  remove(q, true)
end
save_all()
return {1, forgotten, left and 0 or 1, used}

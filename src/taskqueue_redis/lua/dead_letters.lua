--@ base
-- Lists dead letters, the oldest first. ARGV: key, id after which the page begins ("" for the first page), maximum
-- number (0: only the dead letter with this id).
-- Returns per task {id, record, cold fields, body}, and whether the rest of the page is missing because its tasks are
-- large.
local name = PARTITION .. ':q:' .. ARGV[3]
local rank = ARGV[4] ~= '' and call('ZRANK', name .. '/dead', ARGV[4])
local ids
if ARGV[5] == '0' then
  ids = rank and {ARGV[4]} or {}
else
  local start = rank and rank + 1 or 0
  ids = call('ZRANGE', name .. '/dead', start, start + ARGV[5] - 1)
end
local answers = {}
for i = 1, #ids do
  local id = ids[i]
  local cold, body = call('HGET', name .. '/x', id), call('HGET', name .. '/b', id)
  answers[i] = {id, call('HGET', name .. '/t', id), cold, body}
  bytes = bytes + (cold and #cold or 0) + (body and #body or 0)
  if bytes >= BYTES then break end
end
return {answers, #answers < #ids and 1 or 0}

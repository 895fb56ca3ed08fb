--@ base
-- Lists dead letters, the oldest first. ARGV: key, last id of the previous page ("" for none), maximum number; with 0,
-- only the dead letter with that id.
-- Returns per task {id, record, cold fields, body}.
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
  answers[i] = {id, call('HGET', name .. '/t', id), call('HGET', name .. '/x', id), call('HGET', name .. '/b', id)}
end
return answers

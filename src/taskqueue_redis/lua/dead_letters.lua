--@ base
-- Lists dead letters, the oldest first. ARGV: key, the id that ended the page before ("" for none), the most to list.
-- Answers per task {id, record, cold, body}.
local name = PARTITION .. ':q:' .. ARGV[3]
local start = ARGV[4] ~= '' and call('ZRANK', name .. '/dead', ARGV[4])
start = start and start + 1 or 0
local ids = call('ZRANGE', name .. '/dead', start, start + ARGV[5] - 1)
local answers = {}
for i = 1, #ids do
  local id = ids[i]
  answers[i] = {id, call('HGET', name .. '/t', id), call('HGET', name .. '/x', id), call('HGET', name .. '/b', id)}
end
return answers

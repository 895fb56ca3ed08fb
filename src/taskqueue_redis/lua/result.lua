--@ base
-- Returns results. ARGV: key, ids. Returns per task the result, or nothing.
local name, answers = PARTITION .. ':q:' .. ARGV[3], {}
for i = 4, #ARGV do
  local kept = call('ZSCORE', name .. '/k', ARGV[i])
  answers[i - 3] = kept and tonumber(kept) > now and call('HGET', name .. '/o', ARGV[i]) or false
end
return answers

--@ base
-- Returns results. ARGV: key, ids. Returns per task the result, or nothing; only for the first ones if they are large.
local name, answers = PARTITION .. ':q:' .. ARGV[3], {}
for i = 4, #ARGV do
  local kept = call('ZSCORE', name .. '/k', ARGV[i])
  local result = kept and tonumber(kept) > now and call('HGET', name .. '/o', ARGV[i]) or false
  answers[i - 3] = result
  bytes = bytes + (result and #result or 0)
  if bytes >= BYTES then break end
end
return answers

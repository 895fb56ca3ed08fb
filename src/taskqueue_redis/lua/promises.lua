--@ base
-- Lists the queues of the partition that have a durability, in pages. ARGV: cursor. Returns the next cursor, "0" at the
-- end, followed by {key, durability, replicas}.
local page = call('SSCAN', PARTITION .. ':queues', ARGV[3], 'COUNT', 1000)
local answer = {page[1]}
for i = 1, #page[2] do
  local told = call('HMGET', PARTITION .. ':q:' .. page[2][i], 'durability', 'replicas')
  if told[1] then answer[#answer + 1] = {page[2][i], told[1], told[2] or '0'} end
end
return answer

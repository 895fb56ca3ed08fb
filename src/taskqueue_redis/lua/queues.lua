--@ base
-- Lists the queues of the partition, including those that are only subscribed to, in pages. ARGV: "queues" or "subs",
-- cursor. Returns the next cursor, "0" at the end, followed by keys.
if ARGV[3] == 'queues' then
  local page = call('SSCAN', PARTITION .. ':queues', ARGV[4], 'COUNT', 1000)
  table.insert(page[2], 1, page[1])
  return page[2]
end
local page = call('HSCAN', PARTITION .. ':subs', ARGV[4], 'COUNT', 1000)
local answer = {page[1]}
for i = 1, #page[2], 2 do answer[#answer + 1] = page[2][i] end
return answer

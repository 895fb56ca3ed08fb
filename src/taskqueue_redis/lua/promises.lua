--@ base
-- Lists the queues of the partition that have a durability: {key, durability, replicas}.
local promises = {}
local keys = call('SMEMBERS', PARTITION .. ':queues')
for i = 1, #keys do
  local told = call('HMGET', PARTITION .. ':q:' .. keys[i], 'durability', 'replicas')
  if told[1] then promises[#promises + 1] = {keys[i], told[1], told[2] or '0'} end
end
return promises

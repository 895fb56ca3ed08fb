--@ base
-- Lists the queues of the partition, including those that are only subscribed to.
local keys, seen = call('SMEMBERS', PARTITION .. ':queues'), {}
for i = 1, #keys do seen[keys[i]] = true end
local subscribed = call('HKEYS', PARTITION .. ':subs')
for i = 1, #subscribed do
  if not seen[subscribed[i]] then keys[#keys + 1] = subscribed[i] end
end
return keys

--@ base room life
-- Registers a consumer with its keys, and returns the time. Idempotent.
-- ARGV: token, worker identity, time of its start, keys.
local token = ARGV[3]
local consumer = PARTITION .. ':c:' .. token
lift_refusal()
if call('HSETNX', consumer, 'worker', ARGV[4]) == 1 then
  call('HSET', consumer, 'since', ARGV[5], 'turn', 0)
  for i = 6, #ARGV do
    if call('SADD', PARTITION .. ':k:' .. token, ARGV[i]) == 1 then
      call('HINCRBY', PARTITION .. ':subs', ARGV[i], 1)
    end
  end
end
call('ZADD', PARTITION .. ':alive', text(store_time()), token)
return text(now)

--@ base record queue
-- Replaces the settings of a queue if the version is the one in force.
-- ARGV: key, the version that they replace, settings as JSON, window, result_ttl, max_losses, journal ("1" or ""), durability (""
-- for none), replicas that must confirm (0 for none).
-- Answers "ok", or the version in force.
local q = queue(ARGV[3])
lift_refusal()
local version = call('HGET', q.name, 'version') or '0'
if version ~= ARGV[4] then
  if call('HGET', q.name, 'settings') == ARGV[5] then return 'ok' end
  return version
end
call('HSET', q.name, 'version', ARGV[4] + 1, 'settings', ARGV[5], 'window', ARGV[6], 'result_ttl', ARGV[7],
  'max_losses', ARGV[8], 'waiting', q.waiting)
if ARGV[10] ~= '' then call('HSET', q.name, 'durability', ARGV[10]) else call('HDEL', q.name, 'durability') end
if ARGV[11] ~= '0' then call('HSET', q.name, 'replicas', ARGV[11]) else call('HDEL', q.name, 'replicas') end
if ARGV[9] == '1' then call('HSET', q.name, 'journal', '1') else call('HDEL', q.name, 'journal') end
call('SADD', PARTITION .. ':queues', q.key)
local first = call('LINDEX', q.name .. '/l', 0)
if first then
  call('ZADD', PARTITION .. ':forget', text(string.match(first, '^(%d+):') + ARGV[6]), q.key)
end
return 'ok'

--@ base room queue
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
call('HSET', q.name, 'version', ARGV[4] + 1, 'settings', ARGV[5], 'result_ttl', ARGV[7], 'max_losses', ARGV[8],
  'replicas', ARGV[11])
if ARGV[10] ~= '' then call('HSET', q.name, 'durability', ARGV[10]) else call('HDEL', q.name, 'durability') end
q.window, q.journal, q.replicas = tonumber(ARGV[6]), ARGV[9] == '1', tonumber(ARGV[11])
save_all()
local first = call('LINDEX', q.name .. '/l', 0)
if first then
  call('ZADD', PARTITION .. ':forget', text(string.match(first, '^(%d+):') + ARGV[6]), q.key)
end
return 'ok'

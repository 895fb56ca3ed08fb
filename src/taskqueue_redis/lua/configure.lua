--@ base room queue flow
-- Replaces the settings of a queue if the version is the one in force.
-- ARGV: key, the version that they replace, settings as JSON, window, result_ttl, max_losses, journal ("1" or ""), durability (""
-- for none), replicas that must confirm (0 for none), and what limits the flow, each 0 for nothing: capacity, max_inflight,
-- max_tokens and the time in which that many come, whether nothing is handed out (1), whether nothing is taken in (1).
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
local f = flow_of(q)
local had_tokens = f.max_tokens > 0
room(q) -- what has been saved up until now counts at the old rate
f.capacity, f.max_inflight, f.max_tokens, f.period = tonumber(ARGV[12]), tonumber(ARGV[13]), tonumber(ARGV[14]), tonumber(ARGV[15])
f.paused, f.intake_paused = tonumber(ARGV[16]), tonumber(ARGV[17])
f.tokens, f.at = had_tokens and math.min(f.tokens, f.max_tokens) or f.max_tokens, math.max(f.at, now)
q.limited = f.capacity + f.max_inflight + f.max_tokens + f.paused + f.intake_paused > 0
if q.limited then save_flow(q) else call('DEL', q.name .. '/f') end
q.opened = true
save_all()
local first = call('LINDEX', q.name .. '/l', 0)
if first then
  call('ZADD', PARTITION .. ':forget', text(string.match(first, '^(%d+):') + ARGV[6]), q.key)
end
return 'ok'

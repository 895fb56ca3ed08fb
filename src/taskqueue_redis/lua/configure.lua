--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places turns sorting history
-- Replaces the settings of a queue if the given version is the current one.
-- ARGV: key, version that is replaced, settings as JSON, deduplication window, result_ttl, max_losses, journal ("1" or
-- ""), durability ("" for none), number of replicas that must confirm (0 for none), queue to which this one has moved
-- ("" for none), queues to which it is bound (JSON, "" for none), weights of tenants (JSON, "" for none; those of paused
-- tenants are negative), `index` (each name between two NULs), `keep_ended`, `keep_ended_most`, and the numbers in the
-- order of FLOWS (0 for none).
-- Returns "ok", or the current version.
local q = queue(ARGV[3])
lift_refusal()
local version = call('HGET', q.name, 'version') or '0'
if not string.find(version, '^%d+$') then version = ARGV[4] end -- it is damaged
if version ~= ARGV[4] then
  if call('HGET', q.name, 'settings') == ARGV[5] then return 'ok' end
  return version
end
call('HSET', q.name, 'version', ARGV[4] + 1, 'settings', ARGV[5], 'copied', ARGV[5], 'result_ttl', ARGV[7], 'max_losses', ARGV[8],
  'replicas', ARGV[11])
if ARGV[10] ~= '' then call('HSET', q.name, 'durability', ARGV[10]) else call('HDEL', q.name, 'durability') end
local noted_before = q.journal
q.window, q.journal, q.replicas = tonumber(ARGV[6]), ARGV[9] == '1', tonumber(ARGV[11])
if ARGV[12] ~= '' then call('HSET', q.name, 'moved_to', ARGV[12]) else call('HDEL', q.name, 'moved_to') end
if ARGV[13] ~= '' then call('HSET', q.name, 'bound_to', ARGV[13]) else call('HDEL', q.name, 'bound_to') end
q.bound = ARGV[13] ~= ''
if ARGV[15] ~= '' then call('HSET', q.name, 'index', ARGV[15]) else call('HDEL', q.name, 'index') end
q.keeps = tonumber(ARGV[16]) > 0
if q.keeps then
  call('HSET', q.name, 'keep_ended', ARGV[16], 'keep_ended_most', ARGV[17])
else
  call('HDEL', q.name, 'keep_ended', 'keep_ended_most')
end
call('DEL', q.name .. '/W')
for tenant, weight in pairs(ARGV[14] ~= '' and cjson.decode(ARGV[14]) or {}) do
  call('HSET', q.name .. '/W', tenant, weight)
end

local f = flow_of(q)
local was_fair, had_tokens, tokens, period = f.fair == 1, f.max_tokens > 0, f.tenant_tokens, f.tenant_period
room(q) -- tokens that have accumulated until now were earned at the old rate
q.limited = false
for i = 1, #ARGV - 17 do
  f[FLOWS[i]] = tonumber(ARGV[17 + i])
  if f[FLOWS[i]] > 0 then q.limited = true end
end
f.tokens, f.at = had_tokens and math.min(f.tokens, f.max_tokens) or f.max_tokens, math.max(f.at, now)
if f.tenant_tokens ~= tokens or f.tenant_period ~= period then
  f.old_tokens, f.old_period, f.changed, f.rates = tokens, period, now, f.rates + 1
end
if f.tenant_capacity + f.tenant_inflight + f.tenant_tokens == 0 then
  f.epoch = 0
  call('UNLINK', q.name .. '/T', q.name .. '/u')
elseif f.epoch == 0 then
  f.epoch = (ARGV[4] + 1) % 16000 + 1
end
if q.limited then
  save_flow(q)
  copy_flow(q)
else
  call('DEL', q.name .. '/f')
  call('HDEL', q.name, 'limits')
end
q.timed = q.timed or f.processing > 0
q.opened, q.changed = true, true
call('ZADD', PARTITION .. ':idle', text(now + cjson.decode(ARGV[5]).queue_ttl * 1000000), q.key)

-- With fair order, tenants with waiting tasks take turns from now on; otherwise no longer. Tenants that had reached a
-- limit are checked again.
for i = 1, #q.lanes do
  local priority = sub(q.lanes, i, i)
  if f.fair == 0 then
    call('UNLINK', q.name .. '/g' .. priority)
  elseif not was_fair then
    call('ZUNIONSTORE', q.name .. '/g' .. priority, 1, q.name .. '/w' .. priority, 'WEIGHTS', 0)
  end
end
if f.fair == 1 then
  q.sorted = true
  call('ZUNIONSTORE', q.name .. '/v', 1, q.name .. '/v', 'WEIGHTS', 0)
else
  call('UNLINK', q.name .. '/v')
end
if q.journal or noted_before then -- if the journal is switched off, this is the last entry about the queue
  noting().note(q, 'configured', '', {attempt = 0, losses = 0, priority = 0}, '', nil, nil, ARGV[5])
end
if q.sorted then sort_some(q, 250) end
unsort(q)
save_all()
look_later(q)
return 'ok'

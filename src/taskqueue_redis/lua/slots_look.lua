--@ base room slots
-- Returns the pool. ARGV: a model, or "" for all; a random text, which becomes the secret of a pool without one.
-- Returns the epoch, the secret, the time, and per endpoint its id, the last model of its server, and all fields of its
-- hash.
lift_refusal()
demand_pool()
local swept = SWEPT
while swept >= SWEPT do swept = sweep(SWEPT) end

-- The indexes of the leases are created again if another program has deleted them.
local function mend(ids)
  local dated, bound = 0, 0
  for i = 1, #ids do
    local p = place(ids[i])
    if p then
      bound = bound + p.assigned + p.detached
      dated = dated + (p.reports and p.unassigned or held(p))
    end
  end
  if call('ZCARD', LAPSES) >= dated and (bound == 0 or call('EXISTS', JOBS) == 1) then return end
  for i = 1, #ids do
    local p = place(ids[i])
    local all = p and call('HGETALL', p.name) or {}
    for j = 1, #all, 2 do
      local l = match(all[j], '^%d') and lease_at(p, all[j])
      if l then date(p, l) end
      if l and l.job ~= '' then call('HSET', JOBS, named(p.model, l.job), p.id .. ':' .. l.fence) end
    end
  end
end

local secret = call('HGET', POOL, 'key')
if not secret then
  secret = ARGV[4]
  call('HSET', POOL, 'key', secret)
end
local answer, ids = {EPOCH, secret, text(now)}, {}
if ARGV[3] ~= '' then
  ids = ids_of(ARGV[3])
else
  local all = call('HGETALL', POOL)
  for i = 1, #all, 2 do
    if sub(all[i], 1, 1) == 'n' then ids[#ids + 1] = all[i + 1] end
  end
  mend(ids)
end
save_places()
for i = 1, #ids do
  local p = place(ids[i])
  if p then answer[#answer + 1] = {p.id, server_of(p.server).last, call('HGETALL', p.name)} end
end
return answer

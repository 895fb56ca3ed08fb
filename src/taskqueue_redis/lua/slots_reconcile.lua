--@ base room slots
-- Compares the leases of an endpoint with the report of its server.
-- ARGV: model, server, minimum microseconds between two agreeing reports, number of jobs that the server runs ("" if it
-- did not answer), "1" if it lists them, the listed jobs. Returns the epoch, and per lease that has ended its
-- endpoint's id, fence, server, URL, and the lease.
local settled, active = tonumber(ARGV[5]), tonumber(ARGV[6])
lift_refusal()
demand_pool()
sweep(SWEPT)
local p, ended = place_of(ARGV[3], ARGV[4]), {}
if not p then
  save_places()
  return {EPOCH, ended}
end
if not active then
  -- The server may have changed in the time of which nothing is known.
  p.well, p.surplus, p.changed = false, -1, true
  local all = call('HGETALL', p.name)
  for i = 1, #all, 2 do
    local l = match(all[i], '^%d') and lease_at(p, all[i])
    if l and l.missed >= 0 then
      l.missed = -1
      keep(p, l)
    end
  end
  if p.reports then clear(p) end
  save_places()
  return {EPOCH, ended}
end

local runs = {}
for i = 8, #ARGV do runs[ARGV[i]] = true end

-- The counters may be wrong, so the existing leases are counted again.
local all, bound, lapsed = call('HGETALL', p.name), {}, {}
local jobs_lost = call('EXISTS', JOBS) == 0
p.unassigned, p.assigned, p.detached = 0, 0, 0
for i = 1, #all, 2 do
  local l = match(all[i], '^%d') and lease_at(p, all[i])
  if l then
    count(p, l.state, 1)
    if l.job ~= '' then
      bound[#bound + 1] = l
      if jobs_lost then call('HSET', JOBS, named(p.model, l.job), p.id .. ':' .. l.fence) end
    elseif l.expires <= now then
      lapsed[#lapsed + 1] = l
    end
  end
end
for i = 1, #lapsed do finish(p, lapsed[i], true) end

if not p.well and (active <= #bound or (p.surplus >= active and now - p.surplus_at >= settled)) then
  p.well, p.surplus, freed[p] = true, -1, true
elseif not p.well and active > p.surplus then
  p.surplus, p.surplus_at = active, now
end

local overdue, missed = {}, {}
for i = 1, #bound do
  local l = bound[i]
  if ARGV[7] == '1' then
    missed[l] = not runs[l.job]
  elseif active == 0 then
    missed[l] = true
  elseif l.expires <= now then
    overdue[#overdue + 1] = l
  end
end
if active < #bound then
  table.sort(overdue, function(a, b)
    if a.expires ~= b.expires then return a.expires < b.expires end
    return tonumber(a.fence) < tonumber(b.fence)
  end)
  for i = 1, math.min(#overdue, #bound - active) do missed[overdue[i]] = true end
end
table.sort(bound, function(a, b) return tonumber(a.fence) < tonumber(b.fence) end)
for i = 1, #bound do
  local l = bound[i]
  if not missed[l] then
    if l.missed >= 0 then
      l.missed = -1
      keep(p, l)
    end
  elseif l.missed ~= active then
    l.missed, l.missed_at = active, now
    keep(p, l)
  elseif now - l.missed_at >= settled then
    ended[#ended + 1] = {p.id, l.fence, p.server, call('HGET', p.name, 'u'), keep(p, l)}
    finish(p, l, true)
  end
end
p.changed = true
save_places()
return {EPOCH, ended}

--@ base slots
-- Adds an endpoint, or changes it. ARGV: model, server, URL, slots, priority, "1" if its server reports its jobs,
-- maximum number of jobs that the server runs at the same time (0: no limit). Returns the endpoint in the format of
-- `slots_look`.
local model, server, reports, together = ARGV[3], ARGV[4], ARGV[8] == '1', tonumber(ARGV[9])
demand_pool()
local name = 'n' .. named(model, server)
local p, s = place_of(model, server), server_of(server)
if not p then
  local id = call('HGET', POOL, name) or text(call('HINCRBY', POOL, 'ids', 1))
  local ids = without(ids_of(model), id)
  p = {
    id = id, name = POOL .. ':e:' .. id, well = false, rests = 0, surplus = -1, surplus_at = 0, unassigned = 0, assigned = 0,
    detached = 0, model = model, server = server, reports = reports,
  }
  places[id] = p
  ids[#ids + 1] = id
  s.ids = without(ids_at(s), id)
  s.ids[#s.ids + 1] = id
  call('DEL', p.name, p.name .. ':u')
  call('HSET', POOL, name, id, 'm' .. model, cmsgpack.pack(ids))
end
if p.reports ~= reports then -- leases with a job now end by time, or no longer do
  p.reports = reports
  local all = call('HGETALL', p.name)
  for i = 1, #all, 2 do
    local l = match(all[i], '^%d') and lease_at(p, all[i])
    if l and ends_by_time(p, l) then date(p, l) elseif l then undate(p, l) end
  end
end
p.slots, p.priority, p.together, p.draining, p.removed = tonumber(ARGV[6]), tonumber(ARGV[7]), together, false, false
p.changed, freed[p] = true, true
s.together = together
call('HSET', p.name, 'u', ARGV[5])
save_server(server)
sweep(SWEPT)
save_places()
return {EPOCH, text(now), {p.id, s.last, call('HGETALL', p.name)}}

--@ base room slots
-- Changes the state of an endpoint. If it may get no more jobs, its leases without a job end.
-- ARGV: model, server, attribute ("draining", "removed" or "rests"), its value (1 or 0; for "rests" microseconds).
-- Returns 1, or 0 if the endpoint does not exist.
local what, value = ARGV[5], tonumber(ARGV[6])
lift_refusal()
sweep(SWEPT)
local p = place_of(ARGV[3], ARGV[4])
if p then
  if what == 'rests' then p.rests = value > 0 and now + value or 0 else p[what] = value == 1 end
  p.changed, freed[p] = true, true
  if value > 0 then clear(p) end
end
save_places()
return yes(p)

--@ base room slots
-- Says what an endpoint gets; where that is no jobs, what is held of it without one ends.
-- ARGV: model, server, what ("draining", "removed", "rests"), and 1 or 0, or microseconds.
-- Answers 1, or 0 where there is none.
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

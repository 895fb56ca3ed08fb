--@ base room queue states record counts streams flow tenants lanes cold journal places ends returns
-- Takes back what a consumer holds, not as lost, and forgets it. ARGV: token, the most to take in one call.
-- Answers 1 once nothing is left.
lift_refusal()
local _, all = take_back(ARGV[3], false, tonumber(ARGV[4]))
save_all()
return all and 1 or 0

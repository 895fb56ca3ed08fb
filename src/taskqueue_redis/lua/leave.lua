--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events ends after returns
-- Takes back the deliveries of a consumer without counting losses, and removes the consumer. ARGV: token, budget of the
-- call.
-- Returns 1 once none is left.
lift_refusal()
local _, _, all = take_back(ARGV[3], false, tonumber(ARGV[4]))
save_all()
return all and 1 or 0

-- A script that frees memory must run even if Redis has no memory left. Redis refuses a write that needs memory only if
-- it is the first write of a script, so such a script begins with a DEL.
local function lift_refusal() call('DEL', PARTITION .. ':nothing') end

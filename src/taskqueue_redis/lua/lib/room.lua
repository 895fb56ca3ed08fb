-- A script that frees memory must run even if Redis has no memory left. Redis checks its memory limit only before
-- the first write of a script, so such a script begins with a DEL, which needs no memory.
local function lift_refusal() call('DEL', PARTITION .. ':nothing') end

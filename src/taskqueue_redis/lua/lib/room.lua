-- A script that frees memory must run even if Redis has no memory left: Redis refuses writes that need memory only as
-- long as a script has written nothing.
local function lift_refusal() call('DEL', PARTITION .. ':nothing') end

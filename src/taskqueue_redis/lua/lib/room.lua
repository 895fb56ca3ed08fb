-- A script that makes room must pass where memory has run out: Redis refuses writes that need memory
-- only as long as a script has written nothing.
local function lift_refusal() call('DEL', PARTITION .. ':nothing') end

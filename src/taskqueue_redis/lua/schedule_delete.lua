--@ base room schedules
-- Deletes a schedule. ARGV: key, name, version ("" for any). Returns 1, 0 if there is none, or the version that it has.
lift_refusal()
local field = ARGV[4] .. ' ' .. ARGV[3]
local version = read_schedule(field)
if ARGV[5] ~= '' and ARGV[5] ~= (version or '0') then return version or '0' end
return delete_schedule(field)

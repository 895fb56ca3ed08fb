--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events ends after
-- Reports changes of parents to their children. ARGV: per report: child, its entry, parent, state of the parent (0 if it does
-- not exist, 1 if it is live), version, result ("" for none). Returns how many reports were read: only the first ones if
-- they release large tasks.
local read = 0
lift_refusal()
for at = 3, #ARGV, 6 do
  if bytes >= BYTES then break end
  local result = ARGV[at + 5] ~= '' and ARGV[at + 5] or nil
  waiting().inform(ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]), result)
  read = read + 1
end
save_all()
return read

--@ base room queue states record counts flow tenants lanes journal places turns
-- Brings tasks that wait in plain lanes into sorted ones. ARGV: key, the most to move. Answers how many are left.
local q = queue(ARGV[3])
lift_refusal()
if q.sorted and q.waiting > q.laned + q.held and sort_some(q, tonumber(ARGV[4])) == 0 then recount(q) end
save_all()
return q.sorted and q.waiting - q.laned - q.held or 0

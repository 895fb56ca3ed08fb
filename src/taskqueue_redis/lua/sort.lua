--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places turns sorting
-- Moves waiting tasks from plain to sorted lanes, and counts existing tasks for their tenants if tenants are limited.
-- ARGV: key, maximum number, cursor of the count ("" for none). Returns how many tasks are left to sort, and the next
-- cursor.
local q, cursor = queue(ARGV[3]), ARGV[5]
lift_refusal()
local stuck = q.sorted and q.waiting > q.laned + q.held and sort_some(q, tonumber(ARGV[4])) == 0
if stuck then recount(q) end
if cursor ~= '' and flow_of(q).epoch > 0 then cursor = count_some(q, cursor, ARGV[4]) end
if cursor == '0' or flow_of(q).epoch == 0 then cursor = '' end
save_all()
return {q.sorted and not stuck and q.waiting - q.laned - q.held or 0, cursor}

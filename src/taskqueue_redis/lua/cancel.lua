--@ base room queue states record counts streams flow tenants lanes journal places ends
-- Ends a live task as cancelled, whatever its state. ARGV: key, id. Returns 1, or 0 if the task was not live.
local q, id = queue(ARGV[3]), ARGV[4]
lift_refusal()
local packed = call('HGET', q.name .. '/t', id)
local r = read_record(packed)
if not r or not is_live(r) then return 0 end
end_live(q, id, r, CANCELLED, 'cancelled')
save_all()
return 1

--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events ends after
-- Ends a live task as cancelled, whatever its state. ARGV: key, id. Returns 1, or 0 if the task was not live.
local q, id = queue(ARGV[3]), ARGV[4]
lift_refusal()
local r = found(q, id, call('HGET', q.name .. '/t', id))
if not r or not is_live(r) then
  save_all()
  return 0
end
end_live(q, id, r, CANCELLED, 'cancelled')
save_all()
return 1

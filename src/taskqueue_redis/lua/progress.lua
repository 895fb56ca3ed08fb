--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events ends after returns receipts timing
-- Stores the progress of a running task. ARGV: key, id, sequence number of the entry, token, packed progress, progress as JSON. Returns
-- 1, or 0 if the receipt is stale.
local q, id, fence, token = queue(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]
lift_refusal()
local r, name = delivery_of(q, id, fence, token)
if not name then return 0 end
r.at = now
call('HSET', q.name .. '/t', id, write_record(r))
q.extras = true
call('HSET', q.name .. '/p', id, ARGV[7])
if q.timed then note_progress(q, r) end
if has(r, STREAMS) then streamed().tell(q, id, streamed().PROGRESS, ARGV[8]) end
save_all()
return 1

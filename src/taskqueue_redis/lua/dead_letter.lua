--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events ends after receipts
-- Ends a delivery and makes its task a dead letter.
-- ARGV: key, id, sequence number of the entry, token, reason, "1" if there is an error, error, lane,
-- traceback.
-- Returns "ok" or "lost".
local q, id, fence, token, reason = queue(ARGV[3]), ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local error = ARGV[8] == '1' and ARGV[9] or nil
lift_refusal()
local r, name, owner, idle = delivery_of(q, id, fence, token)
if not r then
  local stream = q.name .. '/' .. ARGV[10]
  if reason == 'corrupt' and holder(stream, fence) == token then -- the entry was written by another program
    local fields = fields_at(stream, fence)
    if fields[3] ~= 'again' then q.fresh = q.fresh + 1 end -- the delivery counted it as a first delivery
    drop_entry(q, stream, fence)
    call('HINCRBY', META, 'anomalies', 1)
    recount(q)
    save_all()
    return 'ok'
  end
end
if not name then
  save_all()
  return r and settled_before(r, fence, BURY) or 'lost'
end
local worker = worker_of(q, owner, true)
local body = body_at(name, fence)
local cold = read_cold(q, id)
if error then fail(cold, r.attempt, error, ARGV[11], worker) end
cold.r = reason
r.handed, r.verb, r.answer, r.settled = r.attempt, BURY, 0, r.fence
land(q, r)
bury(q, r, id, body, cold, worker, idle)
write_cold(q, id, cold)
put_down(q, id, r)
call('HDEL', q.name .. '/a', fence)
drop_entry(q, name, fence)
add(q, 'in_flight', -1)
note(q, 'dead_lettered', id, r, 'dead', worker, error, reason)
save_all()
return 'ok'

--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events ends after promote
-- Gives a waiting, scheduled or blocked task another time, unless its attempt was delivered. ARGV: key, id, time.
-- Returns 1, or 0 if the task was not changed. A task that a purge has not reached yet ends.
local q, id, at = queue(ARGV[3]), ARGV[4], ARGV[5]
lift_refusal()
local r = found(q, id, call('HGET', q.name .. '/t', id))
local still = r and is_live(r) and r.handed ~= r.attempt
if still and (r.place == FRESH or r.place == AGAIN) then still = not holder(stream_with(q, r), text(r.fence)) end
if still and r.seq <= purged_to(q) then
  call('HINCRBY', q.name, 'purged', 1)
  end_live(q, id, r, CANCELLED, 'cancelled')
  still = false
end
if not still then
  save_all()
  return 0
end
if r.state == BLOCKED then
  waiting().delay(q, id, tonumber(at))
  note(q, 'rescheduled', id, r, 'blocked', nil, nil, nil, at)
  save_all()
  return 1
end
local body = withdraw(q, r, id)
if not body then -- another program has deleted it
  abandon(q, id)
  save_all()
  return 0
end
if is_fresh(r) then q.fresh = q.fresh + 1 end
if q.sorted then count_fresh(q, r) end
schedule(q, r, id, body, at)
put_down(q, id, r)
local cold = read_cold(q, id)
cold.t = {r.seq, at}
write_cold(q, id, cold)
if r.handed == 0 then release(q, r, id) end -- a task that was delivered keeps its ordering key until it ends
note(q, 'rescheduled', id, r, 'scheduled', nil, nil, nil, at)
save_all()
return 1

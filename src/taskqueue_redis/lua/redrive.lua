--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events ends after promote unique
-- Makes dead letters available again, or discards them, a limited number per call. Tasks that die after the first
-- call are not included.
-- ARGV: key, "redrive" or "discard", highest position among the dead letters ("" for all until now), maximum number,
-- ids (none for all). Returns how many tasks were changed, whether none is left (0 with ids), the highest
-- position, and how many ids were processed.
local q, discard, budget = queue(ARGV[3]), ARGV[4] == 'discard', tonumber(ARGV[6])
local upto = tonumber(ARGV[5]) or q.last
local ids, moved, looked = {}, 0, 0
lift_refusal()
if not discard then promote_first(q) end
if #ARGV > 6 then
  for i = 7, #ARGV do ids[#ids + 1] = ARGV[i] end
else
  ids = call('ZRANGEBYSCORE', q.name .. '/dead', '-inf', text(upto), 'LIMIT', 0, budget)
end
while looked < #ids and bytes < BYTES do
  looked = looked + 1
  local id = ids[looked]
  if call('ZSCORE', q.name .. '/dead', id) then
    local r, cold = record_at(q, id, DEAD, PARKED, nil, now), read_cold(q, id)
    local worker, since = last_run(cold, r.attempt)
    local body, deadline = unearth(q, id, cold)
    bytes = bytes + #(body or '')
    if discard or not body then
      write_cold(q, id, cold)
      finish(q, r, id, DISCARDED, 'discarded', worker, since)
      note(q, 'discarded', id, r, 'discarded', nil, nil, cold.r)
    else
      cold.r = nil
      write_cold(q, id, cold)
      r.prior, r.losses = r.attempt - 1, 0
      if r.flags > 0 then note_change(q, r, id, ALIVE) end
      make_available(q, r, id, body, deadline)
      retake(q, id)
      if deadline then note_deadline(q, id, deadline) end
      note(q, 'redriven', id, r, 'waiting')
    end
    put_down(q, id, r)
    moved = moved + 1
  end
end
save_all()
return {moved, #ARGV == 6 and looked == #ids and #ids < budget and 1 or 0, text(upto), looked}

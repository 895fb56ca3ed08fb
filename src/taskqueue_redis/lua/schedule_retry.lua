--@ base room queue states record counts streams flow tenants lanes cold journal places receipts / states record counts streams flow tenants lanes cold kin damage places events ends after unique
-- Schedules the next attempt of a task, once per retry token.
-- ARGV: key, id, time, retry token ("" for the default), "1" if there is an error, error; of the delivery
-- that the retry settles ("" if none): sequence number, token and attempt; of the task: digest, priority, deadline (""
-- if none), body, tenant and ordering key ("" if none); "1" if the attempt before the retry does not count; traceback; its
-- unique key as JSON ("" if none), see `rare_of`; the batch that it is a member of ("" if none); its tags as
-- JSON ("" if none).
-- Returns how many replicas must confirm, and "accepted", "duplicate" or "lost".
local q, id, at, token = queue(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]
local error = ARGV[7] == '1' and ARGV[8] or nil
local fence, receipt_token, attempt = ARGV[9], ARGV[10], ARGV[11]
local digest, priority, deadline, body = ARGV[12], tonumber(ARGV[13]), ARGV[14], ARGV[15]
local settles = fence ~= ''
lift_refusal()
local packed = call('HGET', q.name .. '/t', id)
local r = read_record(packed)
local name, owner
if settles then
  if r then name, owner = current(q, r, fence, receipt_token) end
  local entry = not name and rarely().record_of_entry(q, id, fence) -- the record is damaged, or the receipt is stale
  if entry then
    r, name, owner = entry, current(q, entry, fence, receipt_token)
  end
else
  if packed and not (r and (is_over(r) or is_there(q, id, r))) then r = rarely().found(q, id, packed) or r end
  if r and r.state == WAITING and (r.place == FRESH or r.place == AGAIN) then
    owner = holder(stream_with(q, r), text(r.fence))
  end
end
local known = r ~= nil
r = r or new_record(priority, digest)
local cold = known and read_cold(q, id) or {h = {}, k = {}}
if token == '' then
  token = 'attempt:' .. (settles and attempt or known and text(owner and r.attempt or r.handed) or '0')
end
if cold.k[token] then
  save_all()
  return {replicas, 'duplicate'}
end
if settles and not name then
  save_all()
  return {0, 'lost'}
end

local live, is_new = known and is_live(r), false
local worker = error and owner and worker_of(q, owner, true) or worker_of(q, owner)
local blocked = live and r.state == BLOCKED
if blocked then
  if is_fresh(r) then leave_fresh(q, r) end
  deadline = nil
elseif live then
  local held = text(r.fence)
  local settled = r.fence
  local stored
  stored, owner = withdraw(q, r, id)
  body = stored or body
  if settles then
    r.verb, r.answer, r.settled = RETRY, 0, settled
  elseif owner then
    revoke(owner, q, held)
  end
  deadline = nil
elseif known and r.state == DEAD then
  local stored
  stored, deadline = unearth(q, id, cold)
  body = stored or body
  r.prior = r.attempt
  if r.flags > 0 then rarely().note_change(q, r, id, ALIVE, nil, '"scheduled"') end
  rarely().retake(q, id)
else
  is_new = true
  if known or not packed then add(q, 'published', 1) end -- else a task whose entry was not found is replaced
  r.digest, r.priority, r.marks, r.tenant, r.entity = digest, priority, 0, ARGV[16], ARGV[17]
  r.flags, r.batch = 0, ''
  if ARGV[21] ~= '' then
    r.flags, r.batch = MEMBER, ARGV[21]
    rarely().count_member(r.batch, 'a', 1)
  end
  if known then rarely().disclaim(q, id) end
  if ARGV[20] ~= '' then rarely().claim(q, id, cjson.decode(ARGV[20]), now) end
  if deadline == '' then deadline = nil end
end
if error then fail(cold, r.attempt, error, ARGV[19], worker) end
keep_token(cold, token, r.attempt)
cold.r = nil
if ARGV[18] == '1' and not (known and r.state == DEAD) then r.prior = r.prior + 1 end
r.attempt, r.losses = r.attempt + 1, 0
if blocked then -- it still waits for others
  r.at = now
  rarely().waiting().delay(q, id, tonumber(at))
else
  schedule(q, r, id, body, at)
end
if is_new then
  tags.drop(q, id)
  if ARGV[22] ~= '' then tags.put(q, id, cjson.decode(ARGV[22])) end
end
if deadline then note_deadline(q, id, deadline) end
add(q, 'retried', 1)
write_cold(q, id, cold)
put_down(q, id, r)
note(q, 'retried', id, r, blocked and 'blocked' or 'scheduled', worker, error, nil, at)
save_all()
return {replicas, 'accepted'}

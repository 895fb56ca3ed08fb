--@ base queue states record counts streams flow tenants lanes cold kin damage places standing
-- Returns what is known of a task. ARGV: key, id. Returns its status, see `standing_of`; its body; the sequence number of its
-- record; the number and the tags that `tags.put` has noted; the last worker, and the time of the last delivery. Whatever is not
-- known is nil. Returns an empty table if there is no such task.
local q, id = queue(ARGV[3]), ARGV[4]
local status, r, held, idle = standing_of(q, id)
if not r or r.state == REPLACED then return {} end
local published, some = tags.of(q, id)
local worker, since, body = false, false, false
if held then
  worker, since = call('HGET', PARTITION .. ':c:' .. held, 'worker'), text(now - idle * 1000)
elseif is_over(r) and r.batch ~= '' then
  worker, since = r.batch, r.entity ~= '0' and r.entity
elseif r.state == DEAD then
  worker, since = last_run(read_cold(q, id), r.attempt)
  worker, since = worker or false, since > 0 and text(since)
end
if r.place == FRESH or r.place == AGAIN then
  body = body_at(stream_with(q, r), text(r.fence))
elseif r.place ~= NOWHERE then
  body = call('HGET', q.name .. '/b', id)
end
return {status, body, text(r.seq), published or false, some or false, worker, since, r.tenant}

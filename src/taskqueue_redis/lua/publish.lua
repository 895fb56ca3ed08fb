--@ base record queue cold journal places ends promote
-- Stores tasks, each once.
-- ARGV: per queue its key and the number of tasks, then per task: id, digest, priority, not before ("" for none),
-- deadline ("" for none), body.
-- Answers per task "accepted <position>", "duplicate" or "conflict"; and how many replicas must have it.
local answers = {}
local at = 3
while at <= #ARGV do
  local q, n = queue(ARGV[at]), tonumber(ARGV[at + 1])
  at = at + 2
  local ids = {}
  for i = 1, n do ids[i] = ARGV[at + 6 * (i - 1)] end
  local records = q.known and call('HMGET', q.name .. ':t', unpack(ids)) or {}
  if q.known then promote_first(q) end
  local written, places = {}, {}
  for i = 1, n do
    local id, digest, priority = ids[i], ARGV[at + 1], tonumber(ARGV[at + 2])
    local not_before, deadline, body = tonumber(ARGV[at + 3]), ARGV[at + 4], ARGV[at + 5]
    at = at + 6
    local packed = places[id] and written[places[id]] or records[i]
    local r = packed and read_record(packed)
    if r and not (is_over(r) and now >= r.at + q.window) then
      answers[#answers + 1] = r.digest == digest and 'duplicate' or 'conflict'
    else
      if r then
        call('HDEL', q.name .. ':x', id)
        call('HDEL', q.name .. ':p', id)
        if call('HDEL', q.name .. ':o', id) == 1 then call('ZREM', q.name .. ':k', id) end
      end
      r = new_record(priority, digest)
      answers[#answers + 1] = 'accepted ' .. (q.waiting + (q.change.waiting or 0))
      if deadline == '' then deadline = nil end
      if not_before and not_before > now then
        schedule(q, r, id, body, text(not_before))
        note(q, 'published', id, r, 'scheduled')
      else
        make_available(q, r, id, body, deadline)
        note(q, 'published', id, r, 'waiting')
      end
      if deadline then note_deadline(q, id, deadline) end
      add(q, 'published', 1)
      written[#written + 1] = id
      written[#written + 1] = write_record(r)
      places[id] = #written
    end
  end
  if #written > 0 then call('HSET', q.name .. ':t', unpack(written)) end
end
save_all()
return {answers, replicas}

--@ base record queue / cold journal places ends promote
-- Stores tasks, each once.
-- ARGV: per queue its key and the number of tasks, then per task: id, digest of 8 bytes and priority (and, where there is
-- one, ":" not before ":" deadline), body.
-- Answers per task how many waited before it, -1 for a duplicate or -2 for a conflict; and how many replicas must have it.
local DUPLICATE, CONFLICT = -1, -2

-- The record of a task that has just become available for the first time.
local moment, tail = pack('>I7', now), pack('>BBI7', 0, 0, 0)

local function fresh_record(priority, seq, digest)
  local sequence = pack('>I7', seq)
  return pack('>BBBHHHH', WAITING, FRESH, priority, 1, 0, 0, 0) .. sequence .. sequence .. moment .. digest .. tail
end

local answers, answered = {}, 0
local at = 3
while at <= #ARGV do
  local q, n = queue(ARGV[at]), tonumber(ARGV[at + 1])
  at = at + 2
  local ids = {}
  for i = 1, n do ids[i] = ARGV[at + 3 * (i - 1)] end
  local records = q.known and call('HMGET', q.name .. '/t', unpack(ids)) or {}
  if q.due and q.due <= now then
    be_refused(q.key)
    rarely().promote(q, 1000)
  end
  local written, filled, places, waiting = {}, 0, {}, q.waiting + (q.change.waiting or 0)
  for i = 1, n do
    local id, about, body = ids[i], ARGV[at + 1], ARGV[at + 2]
    at = at + 3
    local packed = places[id] and written[places[id]] or records[i]
    local known = packed and read_record(packed)
    local answer
    if known and not (is_over(known) and now >= known.at + q.window) and not rarely().is_lost(q, known) then
      answer = known.digest == string.sub(about, 1, 8) and DUPLICATE or CONFLICT
    else
      if known then
        be_refused(q.key)
        rarely().forget_rest(q, id)
      end
      answer = waiting
      local digest, priority = string.sub(about, 1, 8), string.sub(about, 9, 9)
      if #about == 9 then
        use_lane(q, priority)
        local seq = next_seq()
        call('XADD', stream_of(q, 's', priority), text(seq), id, body)
        packed = fresh_record(priority, seq, digest)
        waiting = waiting + 1
        if q.journal then rarely().note_published(q, id, read_record(packed), 'waiting', body) end
      else
        local not_before, deadline = string.match(about, ':(%d*):(%d*)$', 10)
        local r = new_record(tonumber(priority), digest)
        if deadline == '' then deadline = nil end
        if not_before ~= '' and tonumber(not_before) > now then
          rarely().schedule(q, r, id, body, not_before)
          rarely().note_published(q, id, r, 'scheduled', body)
        else
          rarely().make_available(q, r, id, body, deadline)
          add(q, 'waiting', -1) -- counted below
          waiting = waiting + 1
          rarely().note_published(q, id, r, 'waiting', body)
        end
        if deadline then rarely().note_deadline(q, id, deadline) end
        packed = write_record(r)
      end
      written[filled + 1], written[filled + 2] = id, packed
      filled = filled + 2
      places[id] = filled
    end
    answered = answered + 1
    answers[answered] = answer
  end
  if filled > 0 then
    call('HSET', q.name .. '/t', unpack(written))
    add(q, 'published', filled / 2)
    add(q, 'waiting', waiting - q.waiting - (q.change.waiting or 0))
    q.ring = true
  end
end
save_all()
return {answers, replicas}

-- Publishing what is not as usual.

-- Redis refuses this where memory has run out, as long as the script has written nothing.
local function be_refused(q) call('SADD', PARTITION .. ':queues', q.key) end

-- Promotes what has fallen due: it comes before what is published now.
local function promote_before(q)
  be_refused(q)
  promote(q, 1000)
end

-- Whether a task is known, and not so long over that it may come again; answers 0, or why it is not stored.
local function look_up(q, id, packed, digest)
  local r = read_record(packed)
  if (is_over(r) and now >= r.at + q.window) or is_lost(q, r) then
    be_refused(q)
    if is_live(r) then leave_fresh(q, r) end
    forget_rest(q, id)
    return 0
  end
  return r.digest == digest and -1 or -2
end

-- Stores a task that is for later, or has a deadline. Answers its record.
local function publish_unusual(q, id, digest, priority, body, about)
  local not_before, deadline = string.match(about, ':(%d*):(%d*)$', 10)
  local r, state = new_record(tonumber(priority), digest), 'waiting'
  if deadline == '' then deadline = nil end
  if not_before ~= '' and tonumber(not_before) > now then
    state = 'scheduled'
    schedule(q, r, id, body, not_before)
  else
    make_available(q, r, id, body, deadline)
  end
  note_published(q, id, r, state, body)
  if deadline then note_deadline(q, id, deadline) end
  return write_record(r)
end

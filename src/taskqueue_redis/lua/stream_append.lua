--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places receipts events
-- Appends events to the streams of running tasks.
-- ARGV: per item: key, id, sequence number of the entry, token, number of the first event among those of the delivery,
-- number of events; then per event: channel, value.
-- Returns per item 1, or 0 if the receipt is stale; only for the first ones if they are large.
local answers, at, events = {}, 3, streamed()
while at <= #ARGV and bytes < BYTES do
  local q, id, fence, first, n = queue(ARGV[at]), ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
  local r, stream = delivery_of(q, id, fence, ARGV[at + 3])
  at = at + 6
  if stream then
    local name, run = events.of(q, id), tonumber(fence)
    if not has(r, STREAMS) then
      r.flags = r.flags + STREAMS
      put_down(q, id, r) -- the first write: if Redis has no memory left, it ends the script
      call('UNLINK', name) -- the stream of a task that had the id before
    end
    local e = events.last(name)
    if not e or e.kind == events.END then e = events.none() end
    e.attempt = math.max(e.attempt, r.attempt)
    if e.run ~= run then
      e.run, e.taken = run, 0
      events.add(q, name, e, events.ATTEMPT, '', text(r.attempt))
    end
    local left_out = math.max(0, first - 1 - e.taken)
    e.number, e.taken = e.number + left_out, e.taken + left_out
    for i = e.taken - first + 2, n do
      local channel, value = ARGV[at + 2 * i - 2], ARGV[at + 2 * i - 1]
      e.taken, bytes = e.taken + 1, bytes + #value
      events.add(q, name, e, events.DATA, channel, value)
    end
    events.cut(q, name, e)
    events.send(q, id, e)
  end
  at = at + 2 * n
  answers[#answers + 1] = stream and 1 or 0
end
save_all()
return answers

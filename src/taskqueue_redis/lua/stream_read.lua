--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places receipts events
-- Returns events of tasks. ARGV: per task key, id, the attempt and the number of the event after which to continue, and the
-- maximum number of events.
-- Returns per task: nothing if it is unknown; else whether it has ended, the attempt and the number after which the
-- events continue, and entries of its stream. Only for the first ones if they are large.
local answers, at, budget, events = {}, 3, 500, streamed()

-- Returns whether a task has ended, and its stream; nothing if the task is unknown.
local function stream_to_read(q, id)
  local packed, name = call('HGET', q.name .. '/t', id), events.of(q, id)
  local r, e = read_record(packed), events.last(name)
  local ended = e and e.kind == events.END
  if not packed then return ended and q.known and not events.is_gone(q, e.at) and 1 or nil, name, e end
  if not r then return 0 end
  if r.state == REPLACED then return end
  if is_over(r) then
    local own = ended and e.at == r.at -- otherwise the stream of a task that had the id before
    return 1, own and not events.is_gone(q, r.at) and name, e
  end
  return 0, has(r, STREAMS) and not ended and not (r.state == DEAD and events.is_gone(q, r.at)) and name, e
end

while at <= #ARGV and bytes < BYTES and budget > 0 do
  local q, id, attempt, number, limit = queue(ARGV[at]), ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]),
    tonumber(ARGV[at + 4])
  local over, name, e = stream_to_read(q, id)
  local answer, read, stop = {}, 0, false
  if over and not (name and e) then
    answer = {over, attempt, number}
  elseif over then
    if attempt > e.attempt or attempt == e.attempt and number > e.number then attempt, number = 0, 0 end
    answer = {over, attempt, number}
    local after = attempt .. '-' .. text(number)
    while not stop and read < limit and budget > 0 and bytes < BYTES do
      local some = math.min(50, limit - read, budget)
      local entries = call('XRANGE', name, '(' .. after, '+', 'COUNT', some)
      for i = 1, #entries do
        if events.read(entries[i]) then -- another program may have written entries before the last one
          answer[#answer + 1] = entries[i]
          bytes = bytes + #entries[i][2][4]
        end
        after = entries[i][1]
      end
      read, budget, stop = read + #entries, budget - #entries, #entries < some
    end
  end
  answers[#answers + 1], at, budget = answer, at + 5, budget - 1
end
return answers

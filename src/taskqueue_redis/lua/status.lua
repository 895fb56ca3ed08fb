--@ base queue states record counts streams flow tenants lanes cold kin damage places
-- Returns the status of tasks. ARGV: key, ids. Returns per task {record, whether it is in flight, cold fields,
-- progress, due time, the dead letters that hold it}, or an empty table; only for the first ones if their errors are long. Instead of a damaged record, returns
-- the one that would be built again; if the entry is not found, that of a waiting task.
local q, answers = queue(ARGV[3]), {}

-- Returns the names of the dead letters for which a blocked task waits.
local function held_by(id)
  local s, names = unpack_wait(call('HGET', q.name .. '/w:' .. id, 'state')), {}
  for name in pairs(s and s.d or {}) do
    names[#names + 1] = name
    bytes = bytes + #name
  end
  return names
end

for i = 4, #ARGV do
  local id = ARGV[i]
  local packed, answer = call('HGET', q.name .. '/t', id), {}
  if packed then
    local r = read_record(packed)
    if not r then
      r = built(q, id, unpack(place_of(q, id, packed) or {WAITING, PARKED, 5, 0, ''}, 1, 7))
      packed = write_record(r)
    end
    local held = r.state == WAITING and (r.place == FRESH or r.place == AGAIN)
      and holder(stream_with(q, r), text(r.fence))
    answer = {packed, held and 1 or 0, call('HGET', q.name .. '/x', id), call('HGET', q.name .. '/p', id),
      r.state == SCHEDULED and call('ZSCORE', q.name .. '/d', due_member(r, id)), r.state == BLOCKED and held_by(id)}
    bytes = bytes + #packed + (answer[3] and #answer[3] or 0)
  end
  answers[i - 3] = answer
  if bytes >= BYTES then break end
end
return answers

--@ base queue states record counts streams flow tenants lanes cold kin damage places
-- Returns the status of tasks. ARGV: key, ids. Returns per task {record, whether it is in flight, cold fields,
-- progress, due time, of a blocked task {the dead letters that hold it, the first PARENTS_SHOWN parents that it waits for, by
-- name, and the number of all}}, or an empty table; only for the first ones if their errors are long. Instead of a damaged
-- record, returns the one that would be built again; if the entry is not found, that of a waiting task.
local q, answers, PARENTS_SHOWN = queue(ARGV[3]), {}, 20

-- Returns what a blocked task waits for: the dead letters that hold it, the first of all parents, and their number.
local function parents_of(id)
  local fields, held, missing, s = call('HGETALL', q.name .. '/w:' .. id), {}, {}, nil
  for i = 1, #fields, 2 do
    bytes = bytes + #fields[i] + #fields[i + 1]
    if fields[i] == 'state' then s = unpack_wait(fields[i + 1]) end
    if string.find(fields[i], '/', 1, true) then missing[#missing + 1] = fields[i] end
  end
  for name in pairs(s and s.d or {}) do held[#held + 1] = name end
  table.sort(missing)
  return {held, {unpack(missing, 1, PARENTS_SHOWN)}, #missing}
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
      r.state == SCHEDULED and call('ZSCORE', q.name .. '/d', due_member(r, id)), r.state == BLOCKED and parents_of(id)}
    bytes = bytes + #packed + (answer[3] and #answer[3] or 0)
  end
  answers[i - 3] = answer
  if bytes >= BYTES then break end
end
return answers

-- The status of a task.
local PARENTS_SHOWN = 20

-- Returns what a blocked task waits for: the dead letters that hold it, some of all parents, and their number.
local function parents_of(q, id)
  local name, held, some, cursor = q.name .. '/w:' .. id, {}, {}, nil
  local s = unpack_wait(call('HGET', name, 'state'))
  if not s then return {held, some, 0} end -- the next check of maintenance mends it
  for parent in pairs(s.d) do
    held[#held + 1] = parent
    bytes = bytes + #parent
  end
  while cursor ~= '0' and #some < PARENTS_SHOWN do
    local page = call('HSCAN', name, cursor or '0', 'COUNT', 2 * PARENTS_SHOWN)
    cursor = page[1]
    for i = 1, #page[2], 2 do
      bytes = bytes + #page[2][i] + #page[2][i + 1]
      if #some < PARENTS_SHOWN and string.find(page[2][i], '/', 1, true) then some[#some + 1] = page[2][i] end
    end
  end
  return {held, some, s.n}
end

-- Returns {record, whether it is in flight, cold fields, progress, due time, of a blocked task {the dead letters that hold
-- it, up to PARENTS_SHOWN parents that it waits for, and the number of all}}, or an empty table. Instead of a damaged record,
-- returns the one that would be built again; if the entry is not found, that of a waiting task. Returns the parsed record as
-- well, and the consumer and the milliseconds of `holder`.
local function standing_of(q, id)
  local packed = call('HGET', q.name .. '/t', id)
  if not packed then return {} end
  local r = read_record(packed)
  if not r then
    r = built(q, id, unpack(place_of(q, id, packed) or {WAITING, PARKED, 5, 0, ''}, 1, 7))
    packed = write_record(r)
  end
  local held, idle
  if r.state == WAITING and (r.place == FRESH or r.place == AGAIN) then held, idle = holder(stream_with(q, r), text(r.fence)) end
  local answer = {packed, held and 1 or 0, call('HGET', q.name .. '/x', id), call('HGET', q.name .. '/p', id),
    r.state == SCHEDULED and call('ZSCORE', q.name .. '/d', due_member(r, id)), r.state == BLOCKED and parents_of(q, id)}
  bytes = bytes + #packed + (answer[3] and #answer[3] or 0)
  return answer, r, held, idle
end

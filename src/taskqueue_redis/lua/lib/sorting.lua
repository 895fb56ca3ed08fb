-- Sorting: moves entries from plain lanes to sorted ones, first in, first out.

local function sort_returned(q, budget, priority)
  local popped = call('ZPOPMIN', q.name .. '/z' .. priority, budget)
  for i = 1, #popped, 2 do
    local id = popped[i]
    local body = drop_body(q, id)
    q.back = q.back - 1
    if body then
      bytes = bytes + #body
      local r = record_at(q, id, WAITING, PARKED, priority, popped[i + 1], body)
      enter_sorted(q, r, id, body, deadline_of(q, id), true)
      call('HSET', q.name .. '/t', id, write_record(r))
    else
      abandon(q, id)
      add(q, 'waiting', -1)
    end
  end
  return #popped / 2
end

-- Entries that were never delivered have lower sequence numbers than all entries that came into sorted lanes since.
-- Entries that are already in a lane or in flight are skipped. Returns how many entries were read.
local function sort_stream(q, budget, priority, kind)
  local name = stream_of(q, kind, priority)
  local entries = call('XRANGE', name, last_delivered(name), '+', 'COUNT', budget)
  for i = 1, #entries do
    local fence, id, body = sub(entries[i][1], 1, -3), entries[i][2][1], entries[i][2][2]
    bytes = bytes + #body
    local r = not holder(name, fence) and (record_of_entry(q, id, fence) or {})
    if r and not r.state then -- another program has written the entry
      call('XDEL', name, fence)
      call('HINCRBY', META, 'anomalies', 1)
    elseif r then
      count_fresh(q, r)
      if is_held(q, r, id) then
        call('XDEL', name, fence)
        hold(q, r, id, body)
      else
        enter_lane(q, r, kind == 'r')
      end
      call('HSET', q.name .. '/t', id, write_record(r))
    end
  end
  local last = #entries > 0 and entries[#entries][1]
  if last and not move_on(name, last) then call('XGROUP', 'CREATE', name, 'g', last) end
  return #entries
end

-- Sorts up to `budget` entries, and fewer if their bodies are large, but at least some.
local function in_parts(sort, q, budget, ...)
  local sorted = 0
  while sorted < budget do
    local count = math.min(budget - sorted, AT_ONCE)
    local n = sort(q, count, ...)
    sorted = sorted + n
    if n < count or bytes >= BYTES then break end
  end
  return sorted
end

-- Returns how many entries were processed; 0 if no more can be sorted.
local function sort_some(q, budget)
  local looked = 0
  for i = 1, #q.lanes do
    local priority = sub(q.lanes, i, i)
    if budget > looked then looked = looked + in_parts(sort_returned, q, budget - looked, priority) end
    for _, kind in ipairs({'s', 'r'}) do -- 'r' only if a consumer group was lost
      local left = q.waiting - q.back - q.laned - q.held
      if left > 0 and budget > looked then
        looked = looked + in_parts(sort_stream, q, math.min(budget - looked, left + 100), priority, kind)
      end
    end
  end
  return looked
end

-- Counts some existing tasks for their tenants, beginning at a cursor. Returns the next cursor, "0" at the end.
local function count_some(q, cursor, budget)
  local told = call('HSCAN', q.name .. '/t', cursor, 'COUNT', budget)
  for i = 1, #told[2], 2 do
    local id, r = told[2][i], read_record(told[2][i + 1])
    local marks = r and r.marks
    if not r then
      -- a damaged record is built again when the task's entry is found
    elseif r.state == WAITING and (r.place == FRESH or r.place == AGAIN)
      and holder(stream_with(q, r), text(r.fence)) then
      if marks_of(q, r) == 0 then
        mark(q, r, 2)
        note_tenant(q, r.tenant, 0, 1)
      end
    elseif is_live(r) then
      count_fresh(q, r)
    end
    if r and r.marks ~= marks then call('HSET', q.name .. '/t', id, write_record(r)) end
  end
  return told[1]
end

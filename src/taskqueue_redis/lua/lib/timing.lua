-- Deliveries of a queue with `max_processing_time`: `/m` has their entries by the time at which they are taken back.

local function note_start(q, lane, given)
  local period = flow_of(q).processing
  if period == 0 then return end
  local over = {}
  for i = 1, #given, 4 do over[#over + 1], over[#over + 2] = text(now + period), lane .. given[i] end
  call('ZADD', q.name .. '/m', unpack(over))
  index(q, '/m', ':processing')
end

local function note_progress(q, r)
  local period, member = flow_of(q).processing, kind_of(r) .. r.priority .. text(r.fence)
  if period > 0 then
    call('ZADD', q.name .. '/m', text(now + period), member)
  else
    call('ZREM', q.name .. '/m', member)
  end
  index(q, '/m', ':processing')
end

-- Takes back deliveries that have reported no progress for too long. The work is limited by a budget. Returns how many.
local function end_hung(budget)
  local ended = 0
  local keys = call('ZRANGEBYSCORE', PARTITION .. ':processing', '-inf', text(now), 'LIMIT', 0, budget)
  for i = 1, #keys do
    local q = queue(keys[i])
    local hung = call('ZRANGEBYSCORE', q.name .. '/m', '-inf', text(now), 'LIMIT', 0, budget)
    for j = 1, #hung do
      if budget <= 0 or bytes >= BYTES then break end
      local name, fence = q.name .. '/' .. sub(hung[j], 1, 2), sub(hung[j], 3)
      local known = string.find(hung[j], '^[sr]%d%d+$') -- not written by another program
      local fields, owner, idle = known and fields_at(name, fence), nil, nil
      if known then owner, idle = holder(name, fence) end
      local r = fields and owner and record_of_entry(q, fields[1], fence)
      if r then
        call('HDEL', q.name .. '/a', fence)
        hand_back(q, fields[1], r, name, fence, fields[2], true, nil, worker_of(q, owner, true), idle)
        revoke(owner, q, fence)
        ended, bytes = ended + 1, bytes + #fields[2]
      end
      call('ZREM', q.name .. '/m', hung[j])
      budget = budget - 1
    end
    index(q, '/m', ':processing')
    if call('EXISTS', q.name .. '/m') == 0 and flow_of(q).processing == 0 then q.timed = false end
    if budget <= 0 or bytes >= BYTES then break end
  end
  return ended
end

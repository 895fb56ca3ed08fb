--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events ends after unique history
-- Erases tasks of a queue that have a tag, the first ones in the order of their publishes. Live tasks end as cancelled,
-- and dead letters as discarded; then all that is stored of the tasks is deleted. The counters of the queue keep them.
-- ARGV: key, tag, maximum number.
-- Returns the numbers of the states in which the tasks were (10: in flight), and whether the tag has more.
local q, tag, budget = queue(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local IN_FLIGHT = 10
lift_refusal()

-- Ends a task if it has not ended. Returns the number of the state in which it was.
local function end_any(id, r)
  local before = r.state
  if is_live(r) then
    local on_stream = r.place == FRESH or r.place == AGAIN
    if on_stream and holder(stream_with(q, r), text(r.fence)) then before = IN_FLIGHT end
    end_live(q, id, r, CANCELLED, 'cancelled')
  elseif r.state == DEAD then
    local cold = read_cold(q, id)
    bytes = bytes + #(unearth(q, id, cold) or '')
    finish(q, r, id, DISCARDED, 'discarded')
    note(q, 'discarded', id, r, 'discarded', nil, nil, cold.r)
  end
  return before
end

-- Deletes the id of an ended task in the list of ends. The item stays, so that a position in the list stays known.
local function clear_end(id, r)
  local name, item = q.name .. LISTS[r.state], text(r.at) .. ':' .. id
  if call('LINDEX', name, -1) == item then return call('LSET', name, -1, text(r.at) .. ':') end
  local first, last = 0, call('LLEN', name)
  while first < last do -- the items are in the order of their times
    local middle = floor((first + last) / 2)
    if end_in(call('LINDEX', name, middle)) < r.at then first = middle + 1 else last = middle end
  end
  for from = first, first + 900, 100 do -- a script call ends at most 1,000 tasks at the same time
    local items = call('LRANGE', name, from, from + 99)
    for i = 1, #items do
      if items[i] == item then return call('LSET', name, from + i - 1, text(r.at) .. ':') end
    end
    if #items == 0 or end_in(items[#items]) > r.at then return end
  end
end

local members = {}
if q.known then
  members = call('ZRANGE', q.name .. '/i', '[' .. tag .. '\0', '(' .. tag .. '\1', 'BYLEX', 'LIMIT', 0, budget + 1)
end
local unique, before, looked = call('EXISTS', q.name .. '/K') == 1, {}, 0
while looked < math.min(#members, budget) and bytes < BYTES do
  looked = looked + 1
  local seq, id = string.match(sub(members[looked], #tag + 2), '^(%d+)%z(.+)$')
  local r = id and tags.of(q, id) == seq and found(q, id, call('HGET', q.name .. '/t', id))
  if r then
    before[#before + 1] = end_any(id, r)
    clear_end(id, r)
    call('HDEL', q.name .. '/t', id)
    forget_rest(q, id)
    if call('ZREM', q.name .. '/k', id) == 1 then index(q, '/k', ':results') end -- it may be there without a result
    if unique then disclaim(q, id) end
    local name = streamed().of(q, id)
    call('UNLINK', name)
  end
  call('ZREM', q.name .. '/i', members[looked]) -- it may be left of a task that is gone
end
save_all()
return {before, looked < #members and 1 or 0}

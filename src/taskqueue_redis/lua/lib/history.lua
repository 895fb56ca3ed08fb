-- The lists of ended tasks: what is kept in them, and for how long.
local REVISITED = 10000000 -- microseconds after which a queue with `keep_ended` is looked at again

-- Returns for how long tasks are kept, and how many of each state.
local function kept_of(q)
  if not q.keeps then return q.window, 0 end
  local kept = call('HMGET', q.name, 'keep_ended', 'keep_ended_most')
  return math.max(q.window, tonumber(kept[1]) or 0), tonumber(kept[2]) or 100000
end

-- Parses an item of a list. Another program may have written it.
local function end_in(item)
  local at, id = string.match(item, '^(%d+):(.*)$')
  return tonumber(at) or 0, id or ''
end

-- Returns when the first task of a list ended; nothing if the list is empty.
local function first_end(q, state)
  local item = call('LINDEX', q.name .. LISTS[state], 0)
  if item then return (end_in(item)) end
end

-- Returns whether an ended task is still in its list, whose first items were removed. Among those that ended at the same
-- time as the first one, ids tell, of `budget` tasks. `heads`: what was read for other tasks of the queue in this call.
local function is_listed(heads, q, r, id, budget)
  local head = heads[r.state] or {ids = {}}
  if not heads[r.state] then
    local items = call('LRANGE', q.name .. LISTS[r.state], 0, budget - 1)
    for i = 1, #items do
      local at, first = end_in(items[i])
      head.at = head.at or at
      if at > head.at then break end
      head.ids[first] = true
    end
    heads[r.state] = head
  end
  return head.at and (head.at < r.at or head.at == r.at and head.ids[id])
end

-- Returns the items of a list whose time is over, up to `budget`: ids, and the times of their ends. The caller drops them.
local function outlived(q, state, budget)
  local name, ids, ends = q.name .. LISTS[state], {}, {}
  local items = call('LRANGE', name, 0, budget - 1)
  if #items == 0 then return ids, ends end
  local kept, most = q.window, 0
  if state ~= REPLACED then kept, most = kept_of(q) end
  local surplus = kept > q.window and call('LLEN', name) - most or 0
  for i = 1, #items do
    local at, id = end_in(items[i])
    if at + q.window > now or at + kept > now and i > surplus then break end
    ids[i], ends[i] = id, at
  end
  return ids, ends
end

-- Removes the first items of a list. Counts them, so that a position in the list stays known.
local function drop_ends(q, state, n)
  if n == 0 then return end
  call('LTRIM', q.name .. LISTS[state], n, -1)
  call('HINCRBY', q.name, 'dropped' .. state, n)
end

-- Stores when maintenance looks at the lists of a queue the next time.
local function look_later(q)
  local next, kept
  for state in pairs(LISTS) do
    local at = first_end(q, state)
    if at then
      kept = kept or kept_of(q)
      at = at + (state == REPLACED and q.window or kept)
      next = math.min(next or at, at)
    end
  end
  if next and kept > q.window then next = math.min(next, now + REVISITED) end
  if next then
    call('ZADD', PARTITION .. ':forget', text(next), q.key)
  else
    call('ZREM', PARTITION .. ':forget', q.key)
  end
end

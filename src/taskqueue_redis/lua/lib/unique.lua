-- Unique keys. `/K` has per task id the key that its task has: "1" if the task gives the key back when it is delivered,
-- else "0"; the end of its period, 0 for none; the time of its publish; and the key, separated by ":". `/U` has the tasks
-- that may hold a key: a sorted set with equal scores, so its members, key and id separated by a space, are sorted by
-- key. A member that holds nothing is removed when its key is looked up, or when the record of its task is deleted.
local SHARING = 100 -- maximum number of members of a key; there are several only after a replacement or a redrive
local sharers = 0 -- number of members that this script has looked at

-- Returns the unique key of a task; nothing if it has none, or if another program has changed it.
local function unique_of(q, id)
  local packed = call('HGET', q.name .. '/K', id)
  local started, till, first, key = string.match(packed or '', '^([01]):(%d+):(%d+):(%S+)$')
  if key then return {started = started == '1', till = tonumber(till), first = tonumber(first), key = key} end
end

-- Returns up to `count` members of a key, after those that are skipped.
local function members_with(q, key, skipped, count)
  return call('ZRANGE', q.name .. '/U', '[' .. key .. ' ', '(' .. key .. '!', 'BYLEX', 'LIMIT', skipped, count)
end

local function add_member(q, id, key)
  if not members_with(q, key, SHARING - 1, 1)[1] then call('ZADD', q.name .. '/U', 0, key .. ' ' .. id) end
end

-- Lets a task have a key. `asked`: the fields that its publisher has sent, see `rare_of`.
local function claim(q, id, asked, first)
  local till = asked.p and first + asked.p or 0
  call('HSET', q.name .. '/K', id, (asked.s and '1:' or '0:') .. text(till) .. ':' .. text(first) .. ':' .. asked.k)
  add_member(q, id, asked.k)
  call('HSET', q.name, 'unique', 1)
end

-- Deletes the key of a task whose record is deleted, or whose id is used again.
local function disclaim(q, id)
  local u = unique_of(q, id)
  if u then call('ZREM', q.name .. '/U', u.key .. ' ' .. id) end
  call('HDEL', q.name .. '/K', id)
end

-- Lets a dead letter that becomes available again hold its key.
local function retake(q, id)
  local u = unique_of(q, id)
  if u then add_member(q, id, u.key) end
end

-- Returns whether a task holds its key `u`, and its record if it was never delivered.
local function holds(q, id, u)
  sharers = sharers + 1
  local packed = call('HGET', q.name .. '/t', id)
  local r = packed and found(q, id, packed)
  local live = r and is_live(r)
  local fresh = live and r.handed == 0
    and not ((r.place == FRESH or r.place == AGAIN) and holder(stream_with(q, r), text(r.fence)))
  local held = live
  if u.started then held = fresh end
  return held or now < u.till, fresh and r
end

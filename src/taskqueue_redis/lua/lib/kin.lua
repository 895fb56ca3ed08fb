-- The children of tasks, and the lines for other partitions. The name of a task is its queue, "/" and its id.
-- `:children`: a member per child that waits for a task of this partition: "parent child entry kind". The kind is `l` if
-- the child is in this partition, else `f`, followed by `i` if the child wants the parent's result. The record of such a
-- parent has a flag.
-- `:outbox`: lines by their numbers, as "kind parent child". A new line replaces an older one with the same name.
-- `:batches`: per batch, the counts of its members in this partition: `a` added, `d` done, `f` that ended otherwise, `x`
-- dead letters, `c` whether the batch is closed, `v` the version.
-- `:ends`: parents whose last change is not yet reported to all of their children, by the version of that change.
-- `:lines`: what lines say, and for each of these parents the state, its version, the result, and the last child that was
-- informed if the children stay noted.
local OUTBOX, LINES, KIN, ENDS = PARTITION .. ':outbox', PARTITION .. ':lines', PARTITION .. ':children', PARTITION .. ':ends'
local BATCHES = PARTITION .. ':batches'
local counted = {} -- counts of batches that this script has read
local woken = false -- whether the carriers of lines are woken at the end of the script

local function wake_carriers()
  if woken then return end
  woken = true
  at_end[#at_end + 1] = function()
    woken = false
    redis.pcall('PUBLISH', PARTITION .. ':lines:', '')
  end
end

-- Returns a number that is higher than all earlier ones of the partition.
local function next_number()
  local number = math.max(now, (tonumber(call('HGET', META, 'line')) or 0) + 1)
  call('HSET', META, 'line', text(number))
  return number
end

local function add_line(kind, parent, child, said)
  local name = kind .. ' ' .. parent .. ' ' .. child
  call('ZADD', OUTBOX, text(next_number()), name)
  call('HSET', LINES, name, cmsgpack.pack(said))
  wake_carriers()
end

-- Returns some children of a parent, from the first one or after another one.
local function children_of(parent, after, limit)
  return call('ZRANGE', KIN, after and '(' .. after or '[' .. parent .. ' ', '(' .. parent .. '!', 'BYLEX', 'LIMIT', 0, limit)
end

-- Adds the line that reports a change of a parent to a child in another partition.
local function add_end(parent, child, entry, kind, state, version, result)
  result = result and sub(kind, 2) == 'i' and result or nil
  bytes = bytes + (result and #result or 0)
  add_line('end', parent, child, {e = entry, s = state, v = version, r = result})
end

-- Returns the child, its entry and the kind in a member of `:children`.
local function child_in(member) return string.match(member, '^%S+ (%S+) (%S+) (%a+)$') end

-- Returns whether the children of a parent in this state stay noted, because it may change again.
local function stays(state) return state == DEAD or state == ALIVE end

-- Returns the change of a parent that is not yet reported to all of its children.
local function kept_end(parent)
  local sound, e = pcall(cmsgpack.unpack, call('HGET', LINES, parent) or '')
  if sound and type(e) == 'table' then return e end
end

local function keep_end(parent, state, version, result, after)
  call('ZADD', ENDS, text(version), parent)
  call('HSET', LINES, parent, cmsgpack.pack({s = state, v = version, r = result, a = after}))
  wake_carriers()
end

-- Returns what is known about the parents of a blocked task, see `after.lua`; nothing if that is lost.
local function unpack_wait(packed)
  local sound, s = pcall(cmsgpack.unpack, packed or '')
  if sound and type(s) == 'table' and s.w and s.e and s.n and s.s and type(s.d) == 'table' then return s end
end

local function count_of(batch)
  local c = counted[batch]
  if c then return c end
  local sound, kept = pcall(cmsgpack.unpack, call('HGET', BATCHES, batch) or '')
  c = sound and type(kept) == 'table' and kept.a and kept or {a = 0, d = 0, f = 0, x = 0}
  counted[batch] = c
  return c
end

local function save_count(batch)
  local c = counted[batch]
  c.v = text(next_number())
  call('HSET', BATCHES, batch, cmsgpack.pack(c))
end

-- Counts a change of a member. A partition that is closed reports to the batch when all of its members have ended.
local function count_member(batch, field, n)
  local c = count_of(batch)
  c[field] = c[field] + n
  if c.changing then return end
  c.changing = true
  at_end[#at_end + 1] = function()
    c.changing = nil
    save_count(batch)
    if c.c and c.a == c.d + c.f then add_line('count', batch, '-', c) end
  end
end

-- Deletes counts of batches in which nothing can change, a day after the last change.
local function forget_batches()
  local some = call('HRANDFIELD', BATCHES, 20)
  for i = 1, #some do
    local c = count_of(some[i])
    if c.c and not c.changing and c.a == c.d + c.f and tonumber(c.v or 0) + 86400000000 <= now then call('HDEL', BATCHES, some[i]) end
  end
end

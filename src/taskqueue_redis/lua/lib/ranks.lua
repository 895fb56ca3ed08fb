-- Places in lists that are sorted by a score or a time.

-- Returns whether a member comes before another one; Lua compares texts by the locale.
local function precedes(one, other)
  for i = 1, math.min(#one, #other) do
    local a, b = string.byte(one, i), string.byte(other, i)
    if a ~= b then return a < b end
  end
  return #one < #other
end

-- Returns how many members of a sorted set come before a member, which may have left, and whether it is still there.
local function rank_of(name, score, member)
  if tonumber(call('ZSCORE', name, member)) == tonumber(score) then return call('ZRANK', name, member), true end
  local low, high = call('ZCOUNT', name, '-inf', '(' .. score), call('ZCOUNT', name, '-inf', score)
  while low < high do
    local middle = floor((low + high) / 2)
    if precedes(call('ZRANGE', name, middle, middle)[1], member) then low = middle + 1 else high = middle end
  end
  return low, false
end

-- Returns how many of the first `n` tasks of a list by time are before a time. `time_at`: returns the time at a rank; nothing if
-- another program wrote the entry. The number is then lower, or with `newest` higher, so that a page leaves out no task.
local function number_before(time, n, time_at, newest)
  local low = 0
  while low < n do
    local middle = floor((low + n) / 2)
    local at = time_at(middle)
    if at and at < time or not at and newest then low = middle + 1 else n = middle end
  end
  return low
end

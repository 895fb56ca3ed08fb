--@ base room queue states record kin
-- Returns lines of the outbox, the oldest first. ARGV: maximum number, number after which the page begins ("" for the
-- first page).
-- Returns per line {number, kind, parent (or batch), child, entry of the child, "1" if it wants the result, state, version,
-- result ("" for none), and of a batch: the name of the partition, whether it is closed, and its counts}; only the first
-- ones if their results are large.
local limit, after, MANY = tonumber(ARGV[3]), ARGV[4], 10000
lift_refusal()

-- Turns changes of parents that have many children into lines, unless there are very many.
local left = call('ZCARD', OUTBOX) < MANY and limit or 0
local parents = call('ZRANGE', ENDS, 0, AT_ONCE - 1)
for i = 1, #parents do
  local parent = parents[i]
  if left <= 0 or bytes >= BYTES then break end
  local e, rest = kept_end(parent), false
  if e then
    local most = math.min(left, e.r and AT_ONCE or limit)
    local some = children_of(parent, e.a, most)
    for j = 1, #some do
      local child, entry, kind = child_in(some[j])
      if child then add_end(parent, child, entry, kind, e.s, e.v, e.r) end
    end
    left, rest = left - #some, #some == most
    if #some > 0 and not stays(e.s) then call('ZREM', KIN, unpack(some)) end
    if rest and stays(e.s) then keep_end(parent, e.s, e.v, e.r, some[most]) end
  end
  if not rest then
    call('ZREM', ENDS, parent)
    call('HDEL', LINES, parent)
  end
end

local lines, full = {}, false
bytes = 0
while #lines < limit and not full do
  local count = math.min(limit - #lines, AT_ONCE)
  local names = call('ZRANGEBYSCORE', OUTBOX, after == '' and '-inf' or '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, count)
  for i = 1, #names, 2 do
    local kind, parent, child = string.match(names[i], '^(%S+) (%S+) (%S+)$')
    local sound, said = pcall(cmsgpack.unpack, call('HGET', LINES, names[i]) or '')
    after = names[i + 1]
    if kind and sound and type(said) == 'table' then
      local result = said.r or ''
      lines[#lines + 1] = {after, kind, parent, child, said.e or '', said.i and '1' or '', said.s or UNKNOWN_PARENT,
        text(said.v or 0), result, {ARGV[1], said.c and 1 or 0, said.a or 0, said.d or 0, said.f or 0, said.x or 0}}
      bytes = bytes + #result
    else -- another program has deleted or changed it
      call('ZREM', OUTBOX, names[i])
      call('HDEL', LINES, names[i])
      call('HINCRBY', META, 'anomalies', 1)
    end
  end
  full = #names < 2 * count or bytes >= BYTES
end
save_all()
return lines

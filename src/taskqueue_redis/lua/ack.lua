--@ base record queue journal places ends receipts
-- Ends deliveries as executed.
-- ARGV: per group its key, lane, token and number, then per delivery: id, entry of the stream, result ("" for none).
-- Answers "ok" or "lost" per delivery.
local answers = {}
lift_refusal()
local at = 3
while at <= #ARGV do
  local q, lane, token, n = queue(ARGV[at]), ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  at = at + 4
  local name = q.name .. ':' .. lane
  local ids, low, high = {}, nil, nil
  for i = 1, n do
    ids[i] = ARGV[at + 3 * (i - 1)]
    local fence = ARGV[at + 3 * (i - 1) + 1]
    if not low or #fence < #low or (#fence == #low and fence < low) then low = fence end
    if not high or #fence > #high or (#fence == #high and fence > high) then high = fence end
  end
  local packed = call('HMGET', q.name .. ':t', unpack(ids))
  local owned = {}
  local pending = redis.pcall('XPENDING', name, 'g', low, high, 2 * n + 16, token)
  for i = 1, pending.err and 0 or #pending do owned[pending[i][1]] = true end
  local records, fences, ends = {}, {}, {}
  local deadlines = call('EXISTS', q.name .. ':e') == 1
  local results, progress = call('EXISTS', q.name .. ':o') == 1, call('EXISTS', q.name .. ':p') == 1
  local place, stamp = string.sub(lane, 1, 1) == 's' and FRESH or AGAIN, text(now) .. ':'
  local worker = worker_of(q, token)
  for i = 1, n do
    local id, fence, result = ids[i], ARGV[at + 1], ARGV[at + 2]
    at = at + 3
    local answer = 'lost'
    if packed[i] then
      local r = read_record(packed[i])
      if r.state == WAITING and r.place == place and text(r.fence) .. '-0' == fence then
        if owned[fence] == nil and current(q, r, fence, token) then
          owned[fence] = true
          call('HDEL', q.name .. ':a', fence)
        end
        if owned[fence] then
          r.verb, r.answer, r.settled = ACK, 0, r.fence
          r.state, r.place, r.fence, r.at, r.handed = DONE, NOWHERE, 0, now, r.attempt
          records[#records + 1], records[#records + 2] = id, write_record(r)
          fences[#fences + 1] = fence
          ends[#ends + 1] = stamp .. id
          owned[fence] = false
          if deadlines then call('ZREM', q.name .. ':e', id) end
          if result ~= '' then
            call('HSET', q.name .. ':o', id, result)
            call('ZADD', q.name .. ':k', text(now + q.result_ttl), id)
            index(q, ':k', ':results')
          elseif results then
            call('HDEL', q.name .. ':o', id)
          end
          if progress then call('HDEL', q.name .. ':p', id) end
          note(q, 'acked', id, r, 'done', worker)
          answer = 'ok'
          for j = i + 1, n do
            if ids[j] == id then packed[j] = records[#records] end
          end
        end
      else
        answer = settled_before(r, fence, ACK)
      end
    end
    answers[#answers + 1] = answer
  end
  if #fences > 0 then
    call('HSET', q.name .. ':t', unpack(records))
    remember(q, ends)
    call('XACK', name, 'g', unpack(fences))
    call('XDEL', name, unpack(fences))
    add(q, 'in_flight', -#fences)
    add(q, 'done', #fences)
    if deadlines then index(q, ':e', ':deadlines') end
  end
end
save_all()
return answers

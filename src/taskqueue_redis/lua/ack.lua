--@ base room queue states journal / states record counts streams flow tenants lanes cold kin damage places events ends after receipts
-- Ends deliveries as executed.
-- ARGV: per group its key, lane, token, "1" if the calling process knows that it received these deliveries, and their
-- number; then per delivery: id, sequence number of the entry, result ("" for none).
-- Returns "ok" or "lost" per delivery; only for the first ones if their ends made large tasks available.
local answers = {}
lift_refusal()

-- Returns the numbers of a record, unless it is missing or damaged.
local function parts_of(packed)
  local size = packed and #packed or 0
  if size == RECORD_SIZE or size > RECORD_SIZE and string.find(packed, '/', RECORD_SIZE + 4, true) then
    return unpack_struct(RECORD, packed)
  end
end

local at, left, q, lane, token, known = 3, 0
while (left > 0 or at <= #ARGV) and bytes < BYTES do
  if left == 0 then
    q, lane, token, known, left = queue(ARGV[at]), ARGV[at + 1], ARGV[at + 2], ARGV[at + 3] == '1', tonumber(ARGV[at + 4])
    at = at + 5
  end
  local n = q.sorted and math.min(left, 64) or left -- the end of a sorted task may make another task available
  left = left - n
  local name, place = q.name .. '/' .. lane, sub(lane, 1, 1) == 's' and FRESH or AGAIN
  local ids = {}
  for i = 1, n do ids[i] = ARGV[at + 3 * (i - 1)] end
  local records = call('HMGET', q.name .. '/t', unpack(ids))
  local handed_out = tonumber(call('HGET', q.name, lane)) or 0 -- the entries up to this sequence number were delivered
  local deadlines = q.extras and call('EXISTS', q.name .. '/e') == 1
  local results = q.extras and call('EXISTS', q.name .. '/o') == 1
  local progress = q.extras and call('EXISTS', q.name .. '/p') == 1
  local written, fences, ends, changed, sorted = {}, {}, {}, {}, {}
  local stamp, worker = text(now) .. ':', worker_of(q, token)
  for i = 1, n do
    local id, fence, result = ids[i], ARGV[at + 1], ARGV[at + 2]
    at = at + 3
    local answer, packed = 'lost', changed[id] or records[i]
    local sequence = tonumber(fence)
    local state, where, priority, attempt, losses, prior, _, seq, current_fence, _, digest, verb, replied, settled =
      parts_of(packed)
    if (state ~= WAITING or where ~= place or current_fence ~= sequence) and (verb ~= ACK or settled ~= sequence) then
      local r = rarely().record_of_entry(q, id, fence) -- the record is damaged, or the receipt is stale
      packed = r and rarely().write_record(r)
      state, where, priority, attempt, losses, prior, _, seq, current_fence, _, digest, verb, replied, settled =
        parts_of(packed)
    end
    if packed then
      if state == WAITING and where == place and current_fence == sequence then
        local mine = known or rarely().current(q, rarely().read_record(packed), fence, token)
        local by = worker == '' and rarely().worker_at(q, name, fence) or worker
        local tail = (q.keeps or #packed > RECORD_SIZE) and rarely().acked_tail(q, packed, name, fence, by)
        if mine and (q.sorted and call('XACK', name, 'g', fence) == 1 or not q.sorted and sequence <= handed_out) then
          local before = packed
          packed = pack(RECORD, DONE, NOWHERE, priority, attempt, losses, prior, attempt, seq, 0, now, digest, ACK, 0,
            sequence)
          if tail then packed = packed .. tail end
          written[#written + 1], written[#written + 2] = id, packed
          fences[#fences + 1] = fence
          ends[#ends + 1] = stamp .. id
          if deadlines then call('ZREM', q.name .. '/e', id) end
          if progress then call('HDEL', q.name .. '/p', id) end
          if result ~= '' then
            q.extras = true
            call('HSET', q.name .. '/o', id, result)
            call('ZADD', q.name .. '/k', text(now + rarely().setting(q, 'result_ttl', 3600000000)), id)
            rarely().index(q, '/k', ':results')
          elseif results then
            call('HDEL', q.name .. '/o', id)
          end
          if #before > RECORD_SIZE then
            sorted[#sorted + 1], sorted[#sorted + 2] = id, before
            local flags = string.byte(before, RECORD_SIZE + 3)
            if flags > 0 then
              rarely().note_change(q, rarely().read_record(before), id, DONE, result ~= '' and result or nil)
            end
          end
          if q.journal then
            note(q, 'acked', id, {attempt = attempt, losses = losses, priority = priority}, 'done', by)
          end
          answer = 'ok'
          changed[id] = packed
        end
      elseif verb == ACK and settled == sequence then
        answer = replied == 1 and 'dead' or 'ok'
      end
    end
    answers[#answers + 1] = answer
  end
  if #fences > 0 then
    call('HSET', q.name .. '/t', unpack(written))
    if call('RPUSH', q.name .. '/l', unpack(ends)) == #ends then
      call('ZADD', PARTITION .. ':forget', 'LT', text(now + q.window), q.key)
    end
    if not q.sorted then call('XACK', name, 'g', unpack(fences)) end
    call('XDEL', name, unpack(fences))
    if q.extras then call('HDEL', q.name .. '/a', unpack(fences)) end
    if q.timed then
      for i = 1, #fences do fences[i] = lane .. fences[i] end
      call('ZREM', q.name .. '/m', unpack(fences))
    end
    if q.sorted then rarely().settle_sorted(q, sorted) end
    q.in_flight, q.done = q.in_flight - #fences, q.done + #fences
    if deadlines then rarely().index(q, '/e', ':deadlines') end
  end
end
save_all()
return answers

--@ base room queue states record counts streams flow tenants lanes places receipts
-- Moves deliveries to another consumer of the same worker identity; their receipts stay valid.
-- ARGV: token of the new owner, then per receipt: key, lane, sequence number of the entry, token.
-- Returns per receipt {id, body, counters, time of delivery, timeout of an attempt ("" for none), inputs}; an empty table if the
-- receipt is stale or belongs to another worker. Answers only the first ones if their tasks are large.
local heir, answers = ARGV[3], {}
local identity = call('HGET', PARTITION .. ':c:' .. heir, 'worker')
if not identity then return redis.error_reply('TQ GONE no such consumer') end
lift_refusal()
for at = 4, #ARGV, 4 do
  if bytes >= BYTES then break end
  local q, lane, fence, token = queue(ARGV[at]), ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local name = q.name .. '/' .. lane
  local owner, idle = holder(name, fence)
  local answer = {}
  if owner and (owner == token or is_adopted(q, fence, token))
    and call('HGET', PARTITION .. ':c:' .. owner, 'worker') == identity then
    local fields = fields_at(name, fence)
    if fields then
      if owner ~= heir then
        call('XCLAIM', name, 'g', heir, 0, fence, 'JUSTID')
        if heir == token then
          call('HDEL', q.name .. '/a', fence)
        else
          q.extras = true
          call('HSET', q.name .. '/a', fence, token)
        end
        call('SADD', PARTITION .. ':o:' .. heir, lane .. q.key)
      end
      bytes = bytes + #fields[2]
      local since = text(math.max(now - idle * 1000, fence)) -- Redis counts in milliseconds
      answer = {fields[1], fields[2], fields[4] or '', since, timeout_of(q), fields[5] and inputs_of(q, fields[1]) or {}}
    end
  end
  answers[#answers + 1] = answer
end
save_all()
return answers

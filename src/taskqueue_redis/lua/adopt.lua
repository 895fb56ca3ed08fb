--@ base room queue states record counts streams flow tenants lanes places receipts
-- Moves live deliveries of the same worker identity to another consumer; their receipts stay.
-- ARGV: token of the new owner, then per receipt: key, lane, entry, token.
-- Answers per receipt {id, body, more, when it was delivered}, or nothing where it is stale or another's.
local heir, answers = ARGV[3], {}
local identity = call('HGET', PARTITION .. ':c:' .. heir, 'worker')
if not identity then return redis.error_reply('TQ GONE no such consumer') end
lift_refusal()
for at = 4, #ARGV, 4 do
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
      answer = {fields[1], fields[2], fields[4] or '', text(now - idle * 1000)}
    end
  end
  answers[#answers + 1] = answer
end
save_all()
return answers

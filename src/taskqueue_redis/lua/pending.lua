--@ base room life
-- Returns the receipts of a consumer's deliveries in flight, so that the consumer finds those whose answer was
-- lost. A delayed receive of an earlier turn is refused from now on.
-- ARGV: token, turn, lane and sequence number after which the page begins ("" for the first page), maximum number.
-- Returns per lane {key, lane, sequence numbers of the entries, tokens of their receipts}, and the lane and sequence
-- number after which the next page begins (nothing on the last page).
local token, after, fence, left = ARGV[3], ARGV[5], ARGV[6], tonumber(ARGV[7])
local consumer, answers, following = PARTITION .. ':c:' .. token, {}, {}
local turn = tonumber(call('HGET', consumer, 'turn'))
if not turn then return redis.error_reply('TQ GONE no such consumer') end
lift_refusal()
sign_of_life(token)
if tonumber(ARGV[4]) > turn then call('HSET', consumer, 'turn', ARGV[4]) end
local lanes = call('SMEMBERS', PARTITION .. ':o:' .. token)
table.sort(lanes)
for i = 1, #lanes do
  local lane, key = sub(lanes[i], 1, 2), sub(lanes[i], 3)
  if lanes[i] >= after then
    local name = PARTITION .. ':q:' .. key
    local start = lanes[i] == after and text(fence + 1) or '-'
    local pending = of_group('XPENDING', name .. '/' .. lane, 'g', start, '+', left, token) or {}
    local fences, tokens = {}, {}
    for j = 1, #pending do
      fences[j] = sub(pending[j][1], 1, -3)
      tokens[j] = call('HGET', name .. '/a', fences[j]) or token
    end
    if #fences > 0 then answers[#answers + 1] = {key, lane, fences, tokens} end
    left = left - #fences
    if left == 0 then
      following = {lanes[i], fences[#fences]}
      break
    end
  end
end
return {answers, following}

--@ base room life
-- Returns what a consumer has in flight, so that it finds the deliveries of a lost answer.
-- A delayed receive of an earlier turn is refused from now on.
-- ARGV: token, turn. Returns per lane {key, lane, entries in the format of `receive`, tokens of their receipts, times
-- at which they were delivered}.
local token, answers = ARGV[3], {}
local consumer = PARTITION .. ':c:' .. token
local turn = tonumber(call('HGET', consumer, 'turn'))
if not turn then return redis.error_reply('TQ GONE no such consumer') end
lift_refusal()
sign_of_life(token)
if tonumber(ARGV[4]) > turn then call('HSET', consumer, 'turn', ARGV[4]) end
local lanes = call('SMEMBERS', PARTITION .. ':o:' .. token)
for i = 1, #lanes do
  local lane, key = sub(lanes[i], 1, 2), sub(lanes[i], 3)
  local name = PARTITION .. ':q:' .. key .. '/' .. lane
  local pending = redis.pcall('XPENDING', name, 'g', '-', '+', 100000, token)
  local entries, tokens, times = {}, {}, {}
  for j = 1, pending.err and 0 or #pending do
    local entry = call('XRANGE', name, pending[j][1], pending[j][1])[1]
    if entry then
      local fence, fields = sub(entry[1], 1, -3), entry[2]
      entries[#entries + 1], entries[#entries + 2] = fence, fields[1]
      entries[#entries + 1], entries[#entries + 2] = fields[2], fields[4] or ''
      tokens[#tokens + 1] = call('HGET', PARTITION .. ':q:' .. key .. '/a', fence) or token
      times[#times + 1] = text(math.max(now - 1000 * pending[j][3], fence)) -- Redis counts in milliseconds
    end
  end
  answers[i] = {key, lane, entries, tokens, times}
end
return answers

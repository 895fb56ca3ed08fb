--@ base
-- Lists the consumers of the partition: {token, worker, since, keys, number of deliveries in flight}.
local answers, holders = {}, {}

-- Returns how many entries of a stream each consumer has in flight.
local function held(name)
  if not holders[name] then
    local counts, summary = {}, redis.pcall('XPENDING', name, 'g')
    if not summary.err and summary[4] then
      for i = 1, #summary[4] do counts[summary[4][i][1]] = tonumber(summary[4][i][2]) end
    end
    holders[name] = counts
  end
  return holders[name]
end

local tokens = call('ZRANGE', PARTITION .. ':alive', 0, -1)
for i = 1, #tokens do
  local token = tokens[i]
  local about = call('HMGET', PARTITION .. ':c:' .. token, 'worker', 'since')
  local lanes, in_flight = call('SMEMBERS', PARTITION .. ':o:' .. token), 0
  for j = 1, #lanes do
    local name = PARTITION .. ':q:' .. sub(lanes[j], 3) .. '/' .. sub(lanes[j], 1, 2)
    in_flight = in_flight + (held(name)[token] or 0)
  end
  answers[i] = {token, about[1], about[2], call('SMEMBERS', PARTITION .. ':k:' .. token), in_flight}
end
return answers

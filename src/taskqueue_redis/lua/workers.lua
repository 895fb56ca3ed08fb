--@ base
-- Lists the consumers of the partition. ARGV: "" and a cursor: returns the next cursor, "0" at the end, followed by
-- tokens of consumers. Or "of" and tokens: returns for each, and if there is much to count only for the first ones,
-- {token, worker, since, keys, number of deliveries in flight}; the worker is nil if the consumer has gone.
local answers, holders, counted = {}, {}, 0
if ARGV[3] == '' then
  local page = call('ZSCAN', PARTITION .. ':alive', ARGV[4], 'COUNT', 1000)
  answers[1] = page[1]
  for i = 1, #page[2], 2 do answers[#answers + 1] = page[2][i] end
  return answers
end

-- Returns how many entries of a stream each consumer has in flight.
local function held(name)
  if not holders[name] then
    local counts, summary = {}, of_group('XPENDING', name, 'g')
    if summary and summary[4] then
      for i = 1, #summary[4] do counts[summary[4][i][1]] = tonumber(summary[4][i][2]) end
    end
    holders[name], counted = counts, counted + 1
  end
  return holders[name]
end

for i = 4, #ARGV do
  if counted >= 500 then break end
  local token = ARGV[i]
  local about = call('HMGET', PARTITION .. ':c:' .. token, 'worker', 'since')
  local lanes, in_flight = call('SMEMBERS', PARTITION .. ':o:' .. token), 0
  for j = 1, #lanes do
    local name = PARTITION .. ':q:' .. sub(lanes[j], 3) .. '/' .. sub(lanes[j], 1, 2)
    in_flight = in_flight + (held(name)[token] or 0)
  end
  answers[#answers + 1] = {token, about[1], about[2], call('SMEMBERS', PARTITION .. ':k:' .. token), in_flight}
end
return answers

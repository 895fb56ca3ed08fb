-- Signs of life, in the time of the store, even where a test passes another.

local function store_time()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

-- Who receives is alive, even if it comes late: what it holds is not taken from it right after.
local function sign_of_life(token)
  local real = ARGV[2] == '' and now or store_time()
  local beat = call('ZSCORE', PARTITION .. ':alive', token)
  if beat and real - beat > 1000000 then call('ZADD', PARTITION .. ':alive', text(real), token) end
end

-- Heartbeats of consumers. A time that a test passes does not apply to them.

local function store_time()
  if ARGV[2] == '' then return now end
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

-- A consumer that receives is alive even if its heartbeat is late, so its deliveries are not taken back. Its lease, of at
-- least 1 s, lasts for another 0.75 s or longer.
local function sign_of_life(token)
  local real = store_time()
  local beat = call('ZSCORE', PARTITION .. ':alive', token)
  if beat and real - beat > 250000 then call('ZADD', PARTITION .. ':alive', text(real), token) end
end

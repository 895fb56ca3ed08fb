-- Fields that few tasks have: history (h), retry tokens (k), the reason (r) and the deadline (d) of a dead letter, and
-- the time that a reschedule gave the task, after the sequence of the entry that it is for (t). They are packed in one
-- value per task.
local HISTORY = 20
local TRACEBACKS = 3 -- number of the last failures that keep their tracebacks
local TOKENS = 100 -- number of retry tokens that a task keeps: those of its last retries

local function read_cold(q, id)
  local packed = call('HGET', q.name .. '/x', id)
  if packed then
    local sound, cold = pcall(cmsgpack.unpack, packed)
    if sound and type(cold) == 'table' and cold.h and cold.k then return cold end
    redis.pcall('HINCRBY', META, 'anomalies', 1) -- the script itself perhaps only reads
  end
  return {h = {}, k = {}}
end

local function write_cold(q, id, cold) call('HSET', q.name .. '/x', id, cmsgpack.pack(cold)) end

-- Keeps the token of a retry with the attempt before it. Each retry increases the attempt, so old tokens can be found.
local function keep_token(cold, token, attempt)
  for known, at in pairs(cold.k) do
    if (at == true and 0 or at) <= attempt - TOKENS then cold.k[known] = nil end -- `true`: written by an earlier version
  end
  cold.k[token] = attempt
end

local function fail(cold, attempt, error, traceback)
  if #cold.h >= HISTORY then table.remove(cold.h, 1) end
  cold.h[#cold.h + 1] = {attempt, now, error, traceback ~= '' and traceback or nil}
  local older = cold.h[#cold.h - TRACEBACKS]
  if older then older[4] = nil end
end

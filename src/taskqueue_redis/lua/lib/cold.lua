-- Fields that few tasks have: history (h), retry tokens (k), of a dead letter the reason (r), the deadline (d), the worker (w)
-- and the time of the last delivery (s), and the time that a reschedule gave the task, after the sequence of the entry that it is
-- for (t). They are packed in one value per task.
-- The lists of ended tasks, the oldest first, by the numbers of their states: done, expired, cancelled, discarded, replaced.
local LISTS = {[3] = '/l', [5] = '/l:expired', [6] = '/l:cancelled', [7] = '/l:discarded', [8] = '/l:replaced'}
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

-- Returns the worker whose delivery made a task a dead letter, and the time of that delivery. An earlier version stored only
-- failures.
local function last_run(cold, attempt)
  local last = cold.h[#cold.h] or {}
  local who = cold.w or last[1] == attempt and last[5]
  return type(who) == 'string' and who ~= '' and who or nil, tonumber(cold.s) or 0
end

local function write_cold(q, id, cold) call('HSET', q.name .. '/x', id, cmsgpack.pack(cold)) end

-- Keeps the token of a retry with the attempt before it. Each retry increases the attempt, so old tokens can be found.
local function keep_token(cold, token, attempt)
  for known, at in pairs(cold.k) do
    if (at == true and 0 or at) <= attempt - TOKENS then cold.k[known] = nil end -- `true`: written by an earlier version
  end
  cold.k[token] = attempt
end

local function fail(cold, attempt, error, traceback, worker)
  if #cold.h >= HISTORY then table.remove(cold.h, 1) end
  if traceback == '' then traceback = nil end
  if worker == '' then worker = nil end
  cold.h[#cold.h + 1] = {attempt, now, error, traceback or worker and false, worker}
  local older = cold.h[#cold.h - TRACEBACKS]
  if older then older[4] = older[5] and false end
end

-- Tags. `/I` has per task id the sequence number of its publish, in 17 digits, and its tags, each with a NUL before it and,
-- if the index has it, \1 after it. `/i` is the index: a sorted set with equal scores whose members are a tag, that number
-- and the id, separated by NUL. It has the tags that the setting `index` named at the publish, by the part before their
-- first colon.

local tags = {}

-- Returns the number and the tags of a task, with a NUL before each tag, and its value in `/I`; nothing if there are none.
function tags.of(q, id)
  local packed = call('HGET', q.name .. '/I', id)
  local seq, some = string.match(packed or '', '^(%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d)(%z.*)$')
  if seq then return seq, (string.gsub(some, '\1', '')), packed end
end

-- Adds a task to the index by its value in `/I`. Returns how many of its tags the index did not have.
function tags.index(q, id, packed)
  local seq, added = sub(packed, 1, 17), 0
  for tag in string.gmatch(packed, '%z([^%z\1]+)\1') do
    added = added + call('ZADD', q.name .. '/i', 0, tag .. '\0' .. seq .. '\0' .. id)
  end
  return added
end

function tags.drop(q, id)
  local seq, some = tags.of(q, id)
  for tag in string.gmatch(some or '', '%z([^%z]+)') do call('ZREM', q.name .. '/i', tag .. '\0' .. seq .. '\0' .. id) end
  call('HDEL', q.name .. '/I', id)
end

-- Notes the tags of a task that is published now, or at another time.
function tags.put(q, id, some, at)
  local seq, index, own = string.format('%017d', at or q.last), call('HGET', q.name, 'index') or '', {}
  for i = 1, #some do
    own[i] = some[i]
    if string.find(index, '\0' .. string.match(some[i], '^[^:]*') .. '\0', 1, true) then
      call('ZADD', q.name .. '/i', 0, some[i] .. '\0' .. seq .. '\0' .. id)
      own[i] = some[i] .. '\1'
    end
  end
  call('HSET', q.name .. '/I', id, seq .. '\0' .. table.concat(own, '\0'))
  call('HSET', q.name, 'tagged', 1)
end

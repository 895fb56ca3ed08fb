-- What every script begins with. KEYS[1] is the partition; ARGV[1] the epoch the caller knows;
-- ARGV[2] the time in microseconds that a test passes, else empty. Arguments of the script follow from ARGV[3].
local PARTITION = KEYS[1]
local META = PARTITION .. ':meta'
local call, pack, unpack_struct = redis.call, struct.pack, struct.unpack

local known = call('HMGET', META, 'epoch', 'seq')
if known[1] ~= ARGV[1] then
  return redis.error_reply('TQ RESET the partition is not the one it was')
end

local function store_time()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

local now = tonumber(ARGV[2]) or store_time()

-- The sequence: a number that grows with everything that becomes available, close to the time in microseconds.
local first_seq = tonumber(known[2]) or 0
local last_seq = first_seq

local function next_seq()
  last_seq = last_seq + 1
  if last_seq < now then last_seq = now end
  return last_seq
end

local function keep_seq()
  if last_seq ~= first_seq then call('HSET', META, 'seq', string.format('%d', last_seq)) end
end

local function text(number) return string.format('%d', number) end

-- Redis refuses this where memory has run out, as long as the script has written nothing.
local function be_refused(key) call('SADD', PARTITION .. ':queues', key) end

-- Who receives is alive, even if it comes late: what it holds is not taken from it right after.
local function sign_of_life(token)
  local real = ARGV[2] == '' and now or store_time()
  local beat = call('ZSCORE', PARTITION .. ':alive', token)
  if beat and real - beat > 1000000 then call('ZADD', PARTITION .. ':alive', string.format('%d', real), token) end
end

-- A script that makes room must pass where memory has run out: Redis refuses writes that need memory
-- only as long as a script has written nothing.
local function lift_refusal() call('DEL', PARTITION .. ':nothing') end

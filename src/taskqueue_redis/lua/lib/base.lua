-- The beginning of every script. KEYS[1]: the partition. ARGV[1]: the epoch that the caller knows. ARGV[2]: the time in
-- microseconds if a test passes one, else empty. The script's own arguments begin at ARGV[3].
local PARTITION = KEYS[1]
local META = PARTITION .. ':meta'
local call, pack, unpack_struct = redis.call, struct.pack, struct.unpack
local sub, floor = string.sub, math.floor
local BYTES, LARGE = 4194304, 4096 -- bytes after which a script stops its work; size above which a body is large
local AT_ONCE = 16 -- maximum number of entries that a script reads at once if their bodies may be large
local bytes = 0 -- size of the bodies that this script has read or written so far

local meta = call('HMGET', META, 'epoch', 'time', 'ahead')
if meta[1] ~= ARGV[1] then
  return redis.error_reply('TQ RESET the partition is not the one it was')
end

local function text(number) return string.format('%d', number) end

-- Returns the reply to a command on a consumer group; nothing if there is no such stream or group. Any other error, for
-- example a missing right, ends the script, because the group must not be taken for a missing one.
local function of_group(...)
  local reply = redis.pcall(...)
  local err = type(reply) == 'table' and reply.err
  if not err then return reply end
  if not (string.find(err, 'NOGROUP', 1, true) or string.find(err, 'no such key', 1, true)
    or string.find(err, 'requires the key to exist', 1, true)) then error(reply) end
end

-- The store's time never decreases, even if the clock of Redis is set back. `time`: a time that was reached;
-- scripts store it at most once per millisecond. `ahead`: by how much the store's time is ahead of the clock; it
-- shrinks if the clock is set forward again. A refused write must not end the script, because the script itself
-- perhaps only reads.
local now = tonumber(ARGV[2])
if not now then
  local clock, reached, ahead = call('TIME'), tonumber(meta[2]) or 0, tonumber(meta[3]) or 0
  clock = clock[1] * 1000000 + clock[2]
  now = clock + ahead
  if now < reached or now >= reached + 1000 then
    local next = reached + 1000
    if ahead > 0 and clock >= next then
      now, ahead = clock, 0
    elseif now < reached or (ahead > 0 and now > next + 60000000) then
      if reached - now > 100000 then
        redis.pcall('HINCRBY', META, 'steps', 1)
        redis.pcall('HSET', META, 'step', text(reached - now))
      end
      now, ahead = next, next - clock
    end
    -- Every 10 ms, check the rights, because a right that is missing later would end a script half-way. Redis 6.2
    -- cannot check them.
    if floor(now / 10000) ~= floor(reached / 10000) and redis.acl_check_cmd and not (RIGHTS) then
      return redis.error_reply('TQ DENIED a right is missing')
    end
    redis.pcall('HSET', META, 'time', text(now), 'ahead', text(ahead))
  end
end

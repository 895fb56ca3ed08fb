-- The beginning of every script. KEYS[1]: the partition. ARGV[1]: the epoch that the caller knows. ARGV[2]: the time in
-- microseconds if a test passes one, else empty. The script's own arguments begin at ARGV[3].
local PARTITION = KEYS[1]
local META = PARTITION .. ':meta'
local call, pack, unpack_struct = redis.call, struct.pack, struct.unpack
local sub, floor = string.sub, math.floor

if call('HGET', META, 'epoch') ~= ARGV[1] then
  return redis.error_reply('TQ RESET the partition is not the one it was')
end

local now = tonumber(ARGV[2])
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local function text(number) return string.format('%d', number) end

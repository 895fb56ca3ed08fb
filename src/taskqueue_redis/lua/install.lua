-- Prepares the partition at its first use. KEYS[1]: the partition. ARGV: a new epoch, the layout, the number of
-- partitions, the length of the journal (empty: the stored length, or a million), whether the journal has digests
-- (yes or no; empty: as stored).
-- Returns the epoch, layout and number of partitions that are stored.
local meta = KEYS[1] .. ':meta'
redis.call('DEL', KEYS[1] .. ':nothing') -- deletes nothing, but lets the script run if Redis has no memory left
if redis.call('EXISTS', meta) == 0 then
  redis.call('HSET', meta, 'epoch', ARGV[1], 'layout', ARGV[2], 'partitions', ARGV[3])
end
if ARGV[4] ~= '' then
  redis.call('HSET', meta, 'journal_length', ARGV[4])
else
  redis.call('HSETNX', meta, 'journal_length', 1000000)
end
if ARGV[5] == 'no' then
  redis.call('HDEL', meta, 'journal_digest')
elseif ARGV[5] == 'yes' then -- the first digest depends on the epoch
  redis.call('HSETNX', meta, 'journal_digest', redis.call('HGET', meta, 'epoch'))
end
return redis.call('HMGET', meta, 'epoch', 'layout', 'partitions')

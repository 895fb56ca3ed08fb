-- Creates the hash of the partition again if it has a wrong type, because every script reads it at its beginning.
-- Without queues, the partition was deleted, and the key belongs to another program.
-- ARGV: epoch, time, cursor, layout, number of partitions, length of the journal.
do
  local name = KEYS[1] .. ':meta'
  local kind = redis.call('TYPE', name).ok
  if kind ~= 'hash' and kind ~= 'none' and redis.call('EXISTS', KEYS[1] .. ':queues') == 1 then
    redis.call('RENAME', name, KEYS[1] .. ':aside:meta')
    redis.call('HSET', name, 'epoch', ARGV[1], 'layout', ARGV[4], 'partitions', ARGV[5], 'journal_length', ARGV[6])
    redis.call('HINCRBY', name, 'anomalies', 1)
    redis.pcall('RPUSH', KEYS[1] .. ':damaged', '/ meta')
    local last = redis.pcall('XREVRANGE', KEYS[1] .. ':journal', '+', '-', 'COUNT', 1)
    if not last.err and last[1] then -- the number of its first change, and how many others it has
      local ids = ''
      for i = 1, #last[1][2], 2 do
        if last[1][2][i] == 'task_id' then ids = last[1][2][i + 1] end
      end
      local _, others = string.gsub(ids, '%z', '')
      redis.call('HSET', name, 'journal_seq', string.match(last[1][1], '^%d+') + others)
    end
  end
end

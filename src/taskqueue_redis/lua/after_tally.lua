--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events ends after
-- Keeps counts of batches. ARGV: "1" if the counts are those of all partitions, then per count: batch, name of the
-- partition, version, "1" if the partition is closed, added, done, failed, dead.
local sealed, by_batch = ARGV[3] == '1', {}
lift_refusal()
for at = 4, #ARGV, 8 do
  local some = by_batch[ARGV[at]] or {}
  by_batch[ARGV[at]] = some
  some[#some + 1] = {p = ARGV[at + 1], v = ARGV[at + 2], c = ARGV[at + 3] == '1' or nil, a = tonumber(ARGV[at + 4]),
    d = tonumber(ARGV[at + 5]), f = tonumber(ARGV[at + 6]), x = tonumber(ARGV[at + 7])}
end
for batch, counts in pairs(by_batch) do waiting().tally(batch, sealed, counts) end
save_all()
return 'ok'

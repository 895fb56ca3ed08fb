--@ base room queue states record kin
-- Deletes lines that were carried, unless they were replaced. ARGV: per line its number, and its name.
lift_refusal()
for at = 3, #ARGV, 2 do
  if call('ZSCORE', OUTBOX, ARGV[at + 1]) == ARGV[at] then
    call('ZREM', OUTBOX, ARGV[at + 1])
    call('HDEL', LINES, ARGV[at + 1])
  end
end
return 'ok'

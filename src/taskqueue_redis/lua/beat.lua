--@ base room life
-- A sign of life of consumers. ARGV: tokens. Answers those that were given up meanwhile.
local gone = {}
lift_refusal()
local beat = text(store_time())
for i = 3, #ARGV do
  if call('ZSCORE', PARTITION .. ':alive', ARGV[i]) then
    call('ZADD', PARTITION .. ':alive', beat, ARGV[i])
  else
    gone[#gone + 1] = ARGV[i]
  end
end
return gone

--@ base room life
-- Renews the leases of consumers. ARGV: tokens. Returns the tokens of consumers whose leases have expired.
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

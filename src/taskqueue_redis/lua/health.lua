--@ base room
-- Fails if Redis refuses every write. Returns how often inconsistent data was found, and how often the clock was set
-- back.
lift_refusal()
local seen = call('HMGET', META, 'anomalies', 'steps')
return {seen[1] or '0', seen[2] or '0'}

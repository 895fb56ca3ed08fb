--@ base room
-- Fails if Redis refuses writes. Returns how often inconsistent data was found.
lift_refusal()
return tonumber(call('HGET', META, 'anomalies') or 0)

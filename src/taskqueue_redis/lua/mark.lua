--@ base
-- Writes something, so that WAIT on the same connection waits for all that was written before.
lift_refusal()
return call('HINCRBY', META, 'marks', 1)

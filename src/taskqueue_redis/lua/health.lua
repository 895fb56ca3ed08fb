--@ base
-- Answers how often something was not as it should be.
return tonumber(call('HGET', META, 'anomalies') or 0)

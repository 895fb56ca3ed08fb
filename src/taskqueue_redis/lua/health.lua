--@ base
-- Returns how often inconsistent data was found.
return tonumber(call('HGET', META, 'anomalies') or 0)

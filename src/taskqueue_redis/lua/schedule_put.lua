--@ base queue schedules
-- Stores a schedule if the given version is the current one. ARGV: key, name, version that is replaced ("" for any),
-- "1" if a schedule that is stored already keeps the time at which it fires next, that time ("" for none), its
-- specification, and the outcomes of a schedule that is not stored yet, one per line.
-- Returns how many replicas must confirm, then the version, or version, next time, outcomes and refusal that are stored
-- now.
local key, name, given, keep, next_at, spec, outcomes = unpack(ARGV, 3, 9)
local field = name .. ' ' .. key
if call('EXISTS', PARTITION .. ':q:' .. key .. '/n') == 1 then queue(key) end -- for the number of its replicas
local version, planned, before, refused = read_schedule(field)
if given ~= '' and given ~= (version or '0') then
  if version and call('HGET', SPECS, field) == spec then return {replicas, version, planned, before, refused} end
  return {replicas, version or '0'}
end
if version then
  outcomes = before
end
if version and keep == '1' then next_at = planned else refused = '' end
local first = call('ZRANGE', DUE, 0, 0, 'WITHSCORES')
version = new_version()
call('HSET', SPECS, field, spec)
write_schedule(field, version, next_at, outcomes, refused)
if next_at ~= '' and not (first[2] and tonumber(first[2]) <= tonumber(next_at)) then
  redis.pcall('PUBLISH', PARTITION .. ':schedules:', '')
end
return {replicas, version, next_at, outcomes, refused}

--@ base slots
-- Returns the late notes of a job, the oldest first. ARGV: model, job.
sweep(SWEPT)
save_places()
local packed, notes = call('HGET', LATE, 'j' .. named(ARGV[3], ARGV[4])), {}
local members = packed and cmsgpack.unpack(packed) or {}
for i = 1, #members do
  local at = call('ZSCORE', DATES, members[i][1])
  if at and now < at + HOUR then notes[#notes + 1] = call('HGET', LATE, match(members[i][1], '^%d+')) end
end
return notes

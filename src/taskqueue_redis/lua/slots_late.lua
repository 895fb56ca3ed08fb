--@ base slots
-- Returns the late notes of a job, the oldest first. ARGV: model, job.
sweep(SWEPT)
save_places()
local numbers, notes = late_of(ARGV[3], ARGV[4]), {}
for i = 1, #numbers do notes[i] = call('HGET', LATE, numbers[i]) end
return notes

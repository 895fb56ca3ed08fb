--@ base slots
-- Leaves a note for the holder of a job's lease. ARGV: model, job, token, note, a random text that makes the note
-- unique.
-- Returns 1, or 0 if the token is stale; the note is then kept as a late note.
local model, job, note = ARGV[3], ARGV[4], ARGV[6]
sweep(SWEPT)
local p, l = current(ARGV[5])
if not l or l.job ~= job or p.model ~= model then
  put_aside(model, job, note, ARGV[7])
  save_places()
  return 0
end
call('HSET', NOTES, named(model, job), note)
l.noted = true
keep(p, l)
ring(model)
save_places()
return 1

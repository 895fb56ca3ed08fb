--@ base queue states record counts streams flow tenants lanes cold kin damage places standing
-- Returns the status of tasks. ARGV: key, ids. Returns what `standing_of` says per task; only for the first ones if their
-- errors are long.
local q, answers = queue(ARGV[3]), {}
for i = 4, #ARGV do
  answers[i - 3] = standing_of(q, ARGV[i])
  if bytes >= BYTES then break end
end
return answers

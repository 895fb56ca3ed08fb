--@ base queue states journal / states record counts streams flow tenants lanes cold kin damage places events ends after promote unique unusual replacing copies / publishing
-- Stores tasks, unless their ids are known.
-- ARGV: per queue its key and the number of tasks, then the tasks, see `publish_tasks`.
-- Returns how many replicas must confirm, then an answer per task, or only for the first tasks.
local answers, at, full = {0}, 3, false
while at <= #ARGV and not full do
  local n = tonumber(ARGV[at + 1])
  full = publish_tasks(queue(ARGV[at]), at + 2, n, answers)
  at = at + 2 + 3 * n
end
save_all()
answers[1] = replicas
return answers

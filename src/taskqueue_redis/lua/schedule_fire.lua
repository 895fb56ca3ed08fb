--@ base queue states journal schedules / states record counts streams flow tenants lanes cold kin damage places events ends after promote unique unusual replacing copies / publishing
-- Fires schedules that are still the ones that were planned for: publishes their tasks, until one is refused, and sets
-- when they fire next.
-- ARGV: per schedule its key, name, version, the time that was planned for ("" to publish tasks only), when it fires
-- next ("" for never), instants that are skipped (one per line: instant, number, reason), the number of tasks, their
-- instants (separated by spaces), and the tasks, see `publish_tasks`.
-- Returns how many replicas must confirm, then per schedule 0 if it is another one, or the answers for its tasks, up to
-- the first that was refused. Answers only the first schedules or tasks if many copies of tasks were stored.
local OUTCOMES = 20 -- number of outcomes that are kept
local LATER = 1000000 -- microseconds after which a schedule is due again whose instant was not fired

local BY_ANSWER = {[-1] = 'duplicate', [-2] = 'conflict', duplicate = 'overlap', replaced = 'replaced', not_unique = 'not_unique'}
local REFUSALS = {capacity = 'queue_full', tenant_capacity = 'tenant_full'}

-- Returns what is recorded of a task, by the answer for it, and whether it was refused.
local function result_of(answer)
  if type(answer) ~= 'string' then return BY_ANSWER[answer] or 'accepted', false end
  local code = string.match(answer, '^[^:/]*')
  return BY_ANSWER[code] or REFUSALS[code] or code, not BY_ANSWER[code]
end

local answers, at, full = {0}, 3, false
while at <= #ARGV and not full do
  local key, name, version, planned, next_at, skips, n, instants = unpack(ARGV, at, at + 7)
  at, n = at + 8, tonumber(n)
  local field = name .. ' ' .. key
  local current, present, outcomes, refusal = read_schedule(field)
  if current ~= version or planned ~= '' and planned ~= present then
    answers[#answers + 1] = 0
  else
    local lines, published, i = {}, {}, 0
    for line in string.gmatch(outcomes, '[^\n]+') do lines[#lines + 1] = line end
    for instant, count, reason in string.gmatch(skips, '(%d+) (%d+) ([^\n]*)') do
      lines[#lines + 1] = instant .. ' ' .. text(now) .. ' ' .. count .. ' - ' .. reason
    end
    -- `stopped`: the instant with which the schedule continues; `refused`: the line of an instant whose task was refused
    local stopped, refused, changed = nil, nil, n == 0
    for instant in string.gmatch(instants, '%d+') do
      if full then
        stopped = instant
        break
      end
      local id = ARGV[at + 3 * i]
      full = publish_tasks(queue(key), at + 3 * i, 1, published)
      i = i + 1
      local result, is_refused = result_of(published[i])
      local line = instant .. ' ' .. text(now) .. ' 1 ' .. id .. ' ' .. result
      if is_refused then
        stopped, refused = instant, line
        break
      end
      changed = true
      lines[#lines + 1] = line
    end
    if changed then outcomes = table.concat(lines, '\n', math.max(1, #lines - OUTCOMES + 1)) end
    if planned == '' then
      next_at, refused = present, refusal
    else
      if not changed then next_at = present elseif stopped then next_at = stopped end
      if not refused then refused = next_at == present and refusal or '' end
    end
    if changed or refused ~= refusal then change_schedule(field, version, next_at, outcomes, refused) end
    if planned ~= '' and (not changed or next_at == planned) then
      call('ZADD', DUE, text(math.max(now + LATER, tonumber(planned))), field)
    end
    answers[#answers + 1] = published
  end
  at = at + 3 * n
end
save_all()
answers[1] = replicas
return answers

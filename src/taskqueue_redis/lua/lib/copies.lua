-- Fan-out: queues that pass their tasks on to other queues.
local COPIES = 500 -- number of copies after which further tasks are left to the next call
local PARENTS_OF_COPIES = 2000 -- the same number as in taskqueue_core/authoring/waits.py

-- Returns the queues to which a queue is bound; nothing if they are damaged.
local function bound_keys(q)
  local sound, keys = pcall(cjson.decode, call('HGET', q.name, 'bound_to') or '')
  if not sound or type(keys) ~= 'table' or #keys == 0 then return end
  for i = 1, #keys do
    if type(keys[i]) ~= 'string' then return end
  end
  return keys
end

-- Stores a copy of a task in each queue to which its queue is bound, or in none; with a unique key, each queue decides
-- for itself. Returns the answer for the task, and whether further tasks must wait for the next call.
local function publish_copies(bound, id, about, body)
  bound.bound_to = bound.bound_to or bound_keys(bound)
  if not bound.bound_to then -- maintenance applies the settings again
    if not bound.damaged then note_damage(bound, '/') end
    bound.damaged = true
    return 'intake_paused', false
  end
  local keys, lacking, known, replacing, answers = bound.bound_to, {}, {}, {}, {}
  local rare = rare_of(about)
  local u = rare and rare.u
  bound.copies = (bound.copies or 0) + #keys
  local full = bound.copies >= COPIES
  for i = 1, #keys do
    local q = queue(keys[i])
    if q.due <= now then promote_before(q) end
    local packed = call('HGET', q.name .. '/t', id)
    local answer = packed and look_up(q, id, packed, sub(about, 1, 8)) or 0
    if answer == -2 then return -2, full end
    if packed then known[q] = packed end
    if answer == 0 and u then
      local held, r
      answer, held, r = decide(q, u)
      if r then replacing[#replacing + 1] = {q, held, r} end
    end
    if answer ~= 0 then
      answers[answer == -1 and 'duplicate' or string.match(answer, '^[%l_]+')] = answer
    else
      if rare and rare.a and rare.a * #keys > PARENTS_OF_COPIES then return 'too_many_parents:' .. #keys, full end
      local why = q.limited and refusal(q, about) or rare and rare.b and refuse_member(q, id, rare.b)
      if why then return why .. '/' .. q.key, full end
      lacking[#lacking + 1] = q
    end
  end
  bytes = bytes + (#lacking + #replacing) * #body
  for i = 1, #replacing do
    local q, held, r = unpack(replacing[i])
    replace(q, held, r, id, known[q], rare, about, body)
    q.stored = true
  end
  full = full or bytes >= BYTES or sharers >= SHARERS
  if #lacking == 0 then return answers.replaced or answers.duplicate or answers.not_unique, full end
  local position = lacking[1].waiting
  for i = 1, #lacking do
    local q = lacking[i]
    if known[q] then make_way(q, id, known[q]) end
    local record, many = publish_unusual(q, id, sub(about, 1, 8), sub(about, 9, 9), body, about)
    full = full or many
    call('HSET', q.name .. '/t', id, record)
    q.fresh, q.published, q.stored = q.fresh + 1, q.published + 1, true
  end
  return position, full or bytes >= BYTES
end

-- The journal of queues that asked for it: what the scripts did, numbered without gaps. An entry tells what one script did to some tasks
-- in one way, one after another; the number of the first is its place in the stream, so the last so many are kept exactly. Fields
-- come in one order, and those behind the ids have a value per task, with NUL between them, or one where all have the same.
local noted, notes = {}, nil

-- Made when it is needed, as making functions costs a script that is done in microseconds too much.
local function noting()
  if notes then return notes end
  notes = {}
  local JOURNAL = PARTITION .. ':journal'
  local COLUMNS = {'attempt', 'losses', 'priority', 'tenant', 'ordering_key', 'due_at', 'error'}

  local function column(values)
    for i = 2, #values do
      if values[i] ~= values[1] then return table.concat(values, '\0') end
    end
    return values[1]
  end

  local function write_journal()
    local total, length = 0, tonumber(call('HGET', META, 'journal_length'))
    for i = 1, #noted do total = total + #noted[i].ids end
    local seq = call('HINCRBY', META, 'journal_seq', total) - total + 1
    for i = 1, #noted do
      local g, more = noted[i], {}
      for j = 1, #COLUMNS do more[2 * j - 1], more[2 * j] = COLUMNS[j], column(g[COLUMNS[j]]) end
      local oldest = math.max(0, seq - length)
      local written = redis.pcall('XADD', JOURNAL, 'MINID', '~', text(oldest), text(seq) .. '-0', 'v', 2, 'ts', text(now),
        'event', g.event, 'key', g.key, 'state', g.state, 'worker', g.worker, 'reason', g.reason,
        'task_id', table.concat(g.ids, '\0'), unpack(more))
      if written.err then call('HINCRBY', META, 'anomalies', 1) end -- a foreign hand has written there
      seq = seq + #g.ids
    end
    noted = {}
  end

  -- Those of one kind that follow each other stand together.
  local function group_of(q, event, state, worker, reason)
    local g = noted[#noted]
    if g and g.event == event and g.key == q.key and g.state == state and g.worker == worker and g.reason == reason then
      return g
    end
    g = {event = event, key = q.key, state = state, worker = worker, reason = reason, ids = {}}
    for i = 1, #COLUMNS do g[COLUMNS[i]] = {} end
    if #noted == 0 then at_end[#at_end + 1] = write_journal end
    noted[#noted + 1] = g
    return g
  end

  -- `due_at`: when a task that is for later becomes available.
  function notes.note(q, event, id, r, state, worker, error, reason, due_at)
    local g = group_of(q, event, state, worker or '', reason or '')
    local n = #g.ids + 1
    g.ids[n], g.attempt[n], g.losses[n], g.priority[n] = id, r.attempt, r.losses, r.priority
    g.tenant[n], g.ordering_key[n], g.due_at[n] = r.tenant or '', r.entity or '', due_at or ''
    g.error[n] = error and string.gsub(error, '%z', ' ') or ''
  end

  -- What was given to a consumer. `given`: as `receive` answers it.
  function notes.given(q, priority, given, worker)
    local g = group_of(q, 'delivered', 'in_flight', worker, '')
    local n = #g.ids
    for i = 1, #given, 4 do
      local more, attempt, losses = given[i + 3], '1', '0'
      if more ~= '' then attempt, losses = string.match(more, '^(%d+):(%d+)') end
      n = n + 1
      g.ids[n], g.attempt[n], g.losses[n], g.priority[n] = given[i + 1], attempt, losses, priority
      g.tenant[n], g.ordering_key[n], g.due_at[n], g.error[n] = '', '', '', ''
    end
  end

  return notes
end

local function note(q, ...)
  if q.journal then noting().note(q, ...) end
end

local function worker_of(q, token)
  if q.journal and token then return call('HGET', PARTITION .. ':c:' .. token, 'worker') or '' end
end

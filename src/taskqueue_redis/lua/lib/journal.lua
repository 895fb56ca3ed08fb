-- The journal of queues that have it enabled: all state changes, numbered without gaps. An entry records the
-- same change of one or more tasks by one script. The id of the entry in the stream is the number of its first state
-- change, so the stream can be trimmed by number. The fields have a fixed order. Fields after the ids have a value per
-- task, separated by NUL, or one value if it is the same for all tasks. If the partition has digests, each change has
-- one, which depends on the change and on the digest of the change before it.
local noted, notes = {}, nil

-- The functions are created on demand, because creating them would slow down scripts that do not need them.
local function noting()
  if notes then return notes end
  notes = {}
  local JOURNAL = PARTITION .. ':journal'
  local COLUMNS = {'attempt', 'losses', 'priority', 'tenant', 'ordering_key', 'due_at', 'error'}

  -- A column of a group is a single value while all its tasks have the same one; with the first different value it
  -- becomes a list.
  local function other(g, column, value)
    local values, n = g[column], #g.ids
    if type(values) ~= 'table' then
      local same = values
      values = {}
      for i = 1, n - 1 do values[i] = same end
      g[column] = values
    end
    values[n] = value
  end

  local function field(values)
    return type(values) == 'table' and table.concat(values, '\0') or values
  end

  local function write_journal()
    local total, settings = 0, call('HMGET', META, 'journal_length', 'journal_digest')
    local length, digest = tonumber(settings[1]), settings[2]
    for i = 1, #noted do total = total + #noted[i].ids end
    local seq = call('HINCRBY', META, 'journal_seq', total) - total + 1
    for i = 1, #noted do
      local g, more = noted[i], {}
      for j = 1, #COLUMNS do more[2 * j - 1], more[2 * j] = COLUMNS[j], field(g[COLUMNS[j]]) end
      if digest then
        local digests = {}
        for k = 1, #g.ids do
          local change = {digest, text(seq + k - 1), text(now), g.event, g.key, g.state, g.worker, g.reason, g.ids[k]}
          for j = 1, #COLUMNS do
            local values = g[COLUMNS[j]]
            change[#change + 1] = type(values) == 'table' and values[k] or values
          end
          digest = redis.sha1hex(table.concat(change, '\0'))
          digests[k] = digest
        end
        more[#more + 1], more[#more + 2] = 'digest', table.concat(digests, '\0')
      end
      local oldest = math.max(0, seq - length)
      local written = redis.pcall('XADD', JOURNAL, 'MINID', '~', text(oldest), text(seq) .. '-0', 'v', 2, 'ts', text(now),
        'event', g.event, 'key', g.key, 'state', g.state, 'worker', g.worker, 'reason', g.reason,
        'task_id', table.concat(g.ids, '\0'), unpack(more))
      if written.err then call('HINCRBY', META, 'anomalies', 1) end -- another program has written to the stream
      seq = seq + #g.ids
    end
    if digest then call('HSET', META, 'journal_digest', digest) end
    noted = {}
  end

  -- Consecutive changes of the same kind are written as one entry.
  local function noted_with(id, q, event, state, worker, reason, attempt, losses, priority, tenant, ordering_key, due_at, err)
    local g = noted[#noted]
    if g and g.event == event and g.key == q.key and g.state == state and g.worker == worker and g.reason == reason then
      g.ids[#g.ids + 1] = id
      if g.attempt ~= attempt then other(g, 'attempt', attempt) end
      if g.losses ~= losses then other(g, 'losses', losses) end
      if g.priority ~= priority then other(g, 'priority', priority) end
      if g.tenant ~= tenant then other(g, 'tenant', tenant) end
      if g.ordering_key ~= ordering_key then other(g, 'ordering_key', ordering_key) end
      if g.due_at ~= due_at then other(g, 'due_at', due_at) end
      if g.error ~= err then other(g, 'error', err) end
      return
    end
    if not g then at_end[#at_end + 1] = write_journal end
    noted[#noted + 1] = {event = event, key = q.key, state = state, worker = worker, reason = reason, ids = {id},
      attempt = attempt, losses = losses, priority = priority, tenant = tenant, ordering_key = ordering_key,
      due_at = due_at, error = err}
  end

  -- `due_at`: the time at which a scheduled task becomes available.
  function notes.note(q, event, id, r, state, worker, err, reason, due_at)
    local over = r.place == NOWHERE -- other fields are in the place of the ordering key
    noted_with(id, q, event, state, worker or '', reason or '', r.attempt, r.losses, r.priority, not over and r.tenant or '',
      not over and r.entity or '', due_at or '', err and string.gsub(err, '%z', ' ') or '')
  end

  -- Records deliveries. `given`: in the format that `receive` returns.
  function notes.given(q, priority, given, worker)
    for i = 1, #given, 4 do
      local more, attempt, losses = given[i + 3], '1', '0'
      if more ~= '' then attempt, losses = string.match(more, '^(%d+):(%d+)') end
      noted_with(given[i + 1], q, 'delivered', 'in_flight', worker, '', attempt, losses, priority, '', '', '', '')
    end
  end

  return notes
end

local function note(q, ...)
  if q.journal then noting().note(q, ...) end
end

local function worker_of(q, token, always)
  if token and (q.journal or q.keeps or always) then return call('HGET', PARTITION .. ':c:' .. token, 'worker') or '' end
end

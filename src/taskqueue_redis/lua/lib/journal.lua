-- The journal: one entry per transition of a queue that asked for it, numbered without gaps.
local JOURNAL = PARTITION .. ':journal'
local journal_length = nil

-- `more`: further fields and values.
local function note(q, event, id, r, state, worker, error, reason, more)
  if not q.journal then return end
  journal_length = journal_length or call('HGET', META, 'journal_length')
  local n = call('HINCRBY', META, 'journal_seq', 1)
  call('XADD', JOURNAL, 'MAXLEN', '~', journal_length, '*', 'v', 1, 'seq', n, 'ts', text(now), 'event', event,
    'key', q.key, 'task_id', id, 'attempt', r.attempt, 'losses', r.losses, 'state', state, 'priority', r.priority,
    'worker', worker or '', 'error', error or '', 'reason', reason or '', unpack(more or {}))
end

-- Whose task is published, which the header of its envelope tells.
local function note_published(q, id, r, state, body)
  if not q.journal then return end
  local size, tenant = string.byte(body, 2) * 256 + string.byte(body, 3), nil
  if size > 0 then tenant = cmsgpack.unpack(sub(body, 4, 3 + size)).tenant end
  note(q, 'published', id, r, state, nil, nil, nil, {'tenant', tenant or ''})
end

local function worker_of(q, token)
  if q.journal and token then return call('HGET', PARTITION .. ':c:' .. token, 'worker') or '' end
end

-- The journal: one entry per transition of a queue that asked for it, numbered without gaps.
local JOURNAL = PARTITION .. ':journal'
local journal_length = nil

local function note(q, event, id, r, state, worker, error, reason)
  if not q.journal then return end
  journal_length = journal_length or call('HGET', META, 'journal_length') or '1000000'
  local n = call('HINCRBY', META, 'journal_seq', 1)
  call('XADD', JOURNAL, 'MAXLEN', '~', journal_length, '*', 'seq', n, 'ts', text(now), 'event', event, 'key', q.key,
    'task_id', id, 'attempt', r.attempt, 'losses', r.losses, 'state', state, 'priority', r.priority,
    'worker', worker or '', 'error', error or '', 'reason', reason or '')
end

local function worker_of(q, token)
  if q.journal and token then return call('HGET', PARTITION .. ':c:' .. token, 'worker') or '' end
end

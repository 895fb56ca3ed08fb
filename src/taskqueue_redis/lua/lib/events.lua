-- The events that running tasks stream. The stream of a task is the stream `Q/E:ID`; the ids of its entries are those of
-- the events: the attempt, and the number. Each entry has the fields `m` and `v`, the value. `m`: the kind, the time, the
-- size of all events so far, the delivery that appended last (the sequence number of its entry), and how many events of it
-- there were so far, followed by the channel. The record of such a task has the flag STREAMS.
-- Readers of a task are sent what is added to its stream: the id of the last event before, and the new events, each with
-- its id, `m` and `v`; an empty message if that is large. Before each of these texts is its length.

-- Returns the functions for streams. They are defined only when a task streams.
local event_functions
local function streamed()
  if event_functions then return event_functions end
  local events = {ATTEMPT = 1, DATA = 2, PROGRESS = 3, STATE = 4, END = 5}
  local EVENT, EVENT_SIZE = '>BI7I7I7I7', 29
  local MESSAGE = 4096 -- bytes of a message from which on it is large
  local STATES = {nil, nil, '"done"', '"dead"', '"expired"', '"cancelled"', '"discarded"'} -- as JSON

  function events.of(q, id) return q.name .. '/E:' .. id end

  -- Returns the event in an entry; nothing if there is none, or another program has written it.
  function events.read(entry)
    local attempt, number = string.match(entry and entry[1] or '', '^(%d+)%-(%d+)$')
    local m = attempt and #attempt <= 5 and #number <= 15 and #entry[2] == 4 and entry[2][1] == 'm' and entry[2][2]
    if not m or #m < EVENT_SIZE then return end
    local kind, at, size, run, taken = unpack_struct(EVENT, m)
    if kind < events.ATTEMPT or kind > events.END then return end
    return {id = entry[1], attempt = tonumber(attempt), number = tonumber(number), kind = kind, at = at, size = size,
      run = run, taken = taken, own = #m - EVENT_SIZE + #entry[2][4]}
  end

  -- Returns what is in place of the last event of a stream that has none.
  function events.none() return {id = '0-0', attempt = 0, number = 0, size = 0, run = 0, taken = 0} end

  -- Returns the last event of a stream; nothing if there is no stream, or another program has written to it.
  function events.last(name)
    local reply = redis.pcall('XREVRANGE', name, '+', '-', 'COUNT', 1)
    return not reply.err and events.read(reply[1]) or nil
  end

  -- Returns the limits of the streams of a queue: events, bytes, and milliseconds.
  local function limits_of(q)
    if not q.event_limits then
      local sound, settings = pcall(cjson.decode, call('HGET', q.name, 'settings') or '')
      sound = sound and type(settings) == 'table'
      local function limit(name, default) return sound and tonumber(settings[name]) or default end
      q.event_limits = {limit('stream_events', 1000), limit('stream_bytes', 1048576), 1000 * limit('stream_ttl', 3600)}
    end
    return q.event_limits
  end

  -- Returns whether a stream is to be kept no longer. `at`: when its task ended or became a dead letter. Redis deletes the
  -- stream as well, by its own clock.
  function events.is_gone(q, at) return at + 1000 * limits_of(q)[3] <= now end

  -- Adds a new event to the message for the readers. `e`: the last event.
  local function enclose(e, place, m, value)
    local parts = e.message or {pack('>I4', #e.id), e.id}
    e.message, e.enclosed, e.id = parts, (e.enclosed or 0) + #m + #value, place
    if e.enclosed < MESSAGE then
      parts[#parts + 1] = pack('>I4I4I4', #place, #m, #value)
      parts[#parts + 1] = place .. m .. value
    end
  end

  -- Adds an event to a stream. `e`: the last event, which becomes this one.
  function events.add(q, name, e, kind, channel, value)
    e.number, e.size, e.kind = e.number + 1, e.size + #channel + #value, kind
    local m = pack(EVENT, kind, now, e.size, e.run, e.taken) .. channel
    local place = e.attempt .. '-' .. text(e.number)
    enclose(e, place, m, value)
    local reply = redis.pcall('XADD', name, 'MAXLEN', limits_of(q)[1], place, 'm', m, 'v', value)
    local err = type(reply) == 'table' and reply.err
    if not err then return end
    if not (string.find(err, 'WRONGTYPE', 1, true) or string.find(err, 'equal or smaller', 1, true)) then error(reply) end
    call('HINCRBY', META, 'anomalies', 1) -- another program has written to the stream
    call('UNLINK', name)
    call('XADD', name, place, 'm', m, 'v', value)
  end

  -- Cuts the oldest events beyond the size of a stream, some at a time. `e`: the last event, which is kept.
  function events.cut(q, name, e)
    local most = limits_of(q)[2]
    for _ = 1, 500 do
      if e.size <= most then return end -- the size of all events that there ever were
      local entry = call('XRANGE', name, '-', '+', 'COUNT', 1)[1]
      local first = events.read(entry)
      if not entry or first and (first.number == e.number or e.size - first.size + first.own <= most) then return end
      call('XDEL', name, entry[1])
    end
  end

  -- Sends the readers of a task what was added to its stream. `e`: the last event.
  function events.send(q, id, e)
    if not e.message then return end
    local message = e.enclosed < MESSAGE and table.concat(e.message) or ''
    redis.pcall('PUBLISH', PARTITION .. ':events:' .. q.key .. '/' .. id, message)
  end

  -- Adds an event of the store to the stream of a task, if it still has one.
  function events.tell(q, id, kind, value)
    local name = events.of(q, id)
    local e = events.last(name)
    if not e then return end
    events.add(q, name, e, kind, '', value)
    events.cut(q, name, e)
    events.send(q, id, e)
  end

  -- Adds an event for the new state of a task. After its end, the stream is kept for a while. `alive`: the state of a dead
  -- letter that is live again, as JSON.
  function events.change(q, id, state, alive)
    local name = events.of(q, id)
    if state == ALIVE then
      call('PERSIST', name)
      events.tell(q, id, events.STATE, alive or '"waiting"')
    else
      events.tell(q, id, state == DEAD and events.STATE or events.END, STATES[state])
      call('PEXPIRE', name, text(limits_of(q)[3]))
    end
  end

  event_functions = events
  return events
end

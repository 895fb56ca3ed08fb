-- Tasks that wait for others. A blocked task is in `/blocked`, by its sequence number, and its body in `/b`. `/w:` and its
-- id is a hash: `state` (packed, see `admit`), a field per missing parent with the place of its result among the inputs,
-- ":" and the version that was reported last, and `iN`, the inputs. If the task has inputs, the hash is kept until the task
-- has ended, with `inputs`, their number, instead of `state`. `/blocked_on_dead`: those that a dead letter holds.
local waits = nil

-- The functions are created on demand, because creating them would slow down scripts that do not need them.
local function waiting()
  if waits then return waits end
  waits = {}
  local INPUTS = 262144 -- maximum number of bytes of all inputs of a task
  local MOST = 250 -- maximum number of children that a script informs
  local AGAIN_AFTER = 3600000000 -- microseconds after which a blocked task asks for its parents again
  local PARENTS_ASKED = 1000 -- number of parents after which a script leaves the others to the next one
  local left, absent = 0, {} -- number of children that it may still inform

  -- Returns the queue of a task and its id; nothing if there is no such queue.
  local function home_of(name)
    local key, id = string.match(name, '^([^/]*)/(.*)$')
    if not key or absent[key] then return end
    if queues[key] or call('EXISTS', PARTITION .. ':q:' .. key .. '/n') == 1 then return queue(key), id end
    absent[key] = true
  end

  -- Looks at a parent, and notes a child at it unless it has ended. Returns its record, and its result if the child wants
  -- it; nothing if it is not in this partition. Returns nothing, too, and true as the third value, while children of an
  -- earlier task with this id, which has ended, are still to be informed: a note would be taken for one of theirs.
  function waits.look_at(parent, child, entry, kind)
    local q, id = home_of(parent)
    local r = q and found(q, id, call('HGET', q.name .. '/t', id))
    if not r or r.state == REPLACED then return end
    if is_over(r) then
      local till = r.state == DONE and sub(kind, 2) == 'i' and call('ZSCORE', q.name .. '/k', id)
      local result = till and tonumber(till) > now and call('HGET', q.name .. '/o', id) or nil
      bytes = bytes + (result and #result or 0)
      return r, result
    end
    local e = not has(r, CHILDREN) and kept_end(parent)
    if e and not stays(e.s) then return nil, nil, true end
    call('ZADD', KIN, 0, parent .. ' ' .. child .. ' ' .. entry .. ' ' .. kind)
    if not has(r, CHILDREN) then
      r.flags = r.flags + CHILDREN
      put_down(q, id, r)
    end
    return r
  end

  -- Counts a change of a parent for a child. Returns whether the child waits for this parent no longer.
  local function count_end(s, parent, state)
    s.d[parent] = nil
    if state == ALIVE then return false end
    if state == DEAD and s.w == 'done' and not s.c then
      s.d[parent] = true
      return false
    end
    s.n = s.n - 1
    if state == UNKNOWN_PARENT then
      s.x = s.x or 'unknown_parent'
    elseif s.w == 'done' and state ~= DONE or s.w == 'failed' and s.n == 0 and state == DONE and not s.f then
      s.x = s.x or 'parent_ended'
    elseif s.w == 'failed' and state ~= DONE then
      s.f = true
    end
    return true
  end

  -- Keeps the result of a parent for a child. `place`: where the child wants it among its inputs.
  local function keep_input(s, name, place, result)
    if not result or place == '' then return end
    s.s = s.s + #result
    if s.s <= INPUTS then call('HSET', name, 'i' .. place, result) end
  end

  local function keep_reason(q, id, reason)
    local cold = read_cold(q, id)
    cold.r = reason
    write_cold(q, id, cold)
    return cold
  end

  -- Adds a blocked task to the index of those that a dead letter holds, or removes it. Returns whether that changed it.
  function waits.list_held(q, id, s)
    if next(s.d) then return call('ZADD', q.name .. '/blocked_on_dead', 0, id) == 1 end
    return call('ZREM', q.name .. '/blocked_on_dead', id) == 1
  end

  local function is_met(s) return (s.n == 0 or s.f) and not s.b end

  -- Does what follows from what is known about the parents of a task that is nowhere and does not count as fresh. Returns
  -- its new state, and why it ended or became a dead letter.
  local function proceed(q, r, id, body, s)
    local name = q.name .. '/w:' .. id
    if s.g and not s.x then
      finish(q, r, id, DONE, 'done')
      return 'done'
    elseif s.x then
      keep_reason(q, id, s.x)
      finish(q, r, id, CANCELLED, 'cancelled')
      return 'cancelled', s.x
    elseif s.s > INPUTS then
      call('UNLINK', name)
      r.flags = r.flags - KEPT
      local cold = keep_reason(q, id, 'inputs_too_large')
      bury(q, r, id, body, cold)
      write_cold(q, id, cold)
      return 'dead', 'inputs_too_large'
    elseif s.i == 0 then
      call('UNLINK', name)
      r.flags = r.flags - KEPT
    else
      call('HDEL', name, 'state')
      call('HSET', name, 'inputs', s.i)
    end
    if is_fresh(r) then q.fresh = q.fresh + 1 end
    if not s.t or s.t <= now then
      make_available(q, r, id, body, deadline_of(q, id))
      return 'waiting'
    end
    if q.sorted then count_fresh(q, r) end
    schedule(q, r, id, body, text(s.t))
    return 'scheduled'
  end

  -- Stores a task that waits for others, and is stored nowhere yet. `after`, from the task's header: `w`: what it waits for
  -- (done, ended, failed), `c`: whether a dead letter ends the wait, `p`: the names of the parents, `i`: the numbers of the
  -- parents whose results are inputs, from 0. What is known is kept with `w`, `c`, `e`: the number of this entry, `n`:
  -- number of missing parents, `d`: those that are dead letters, `f`: whether one has failed, `x`: why the task is cancelled,
  -- `i`: number of inputs, `s`: their size, `t`: the time before which the task is not available, `g`: whether it is a batch,
  -- `b`: the counts of a batch that has not ended, by partition, `o`: whether these are all partitions, `z`: when it was asked
  -- last what has become of the parents.
  -- Returns the state of the task, and why it ended or became a dead letter.
  function waits.admit(q, r, id, body, time)
    local about = header_of(body)
    local after = about.after or {w = 'done', p = {}, i = {}}
    local s = {w = after.w, c = after.c or nil, e = text(next_number()), n = #after.p, d = {}, i = #after.i, s = 0, t = time, z = now}
    local name, child, places, missing, away = q.name .. '/w:' .. id, q.key .. '/' .. id, {}, {}, {}
    if about.batch == child then s.g, s.b = true, {} end
    for i = 1, #after.i do places[after.p[after.i[i] + 1]] = text(i) end
    r.flags = r.flags + KEPT
    for i = 1, #after.p do
      local parent = after.p[i]
      local place = places[parent]
      local p, result = waits.look_at(parent, child, s.e, place and 'li' or 'l')
      if p and not is_live(p) and count_end(s, parent, p.state) then
        keep_input(s, name, place, result)
      else
        missing[#missing + 1], missing[#missing + 2] = parent, place or ''
        if not p then away[#away + 1] = parent end
      end
    end
    waits.looked = (waits.looked or 0) + #after.p
    if s.x or s.s > INPUTS or is_met(s) then return proceed(q, r, id, body, s) end
    for i = 1, #away do add_line('register', away[i], child, {e = s.e, i = places[away[i]] and true}) end
    call('HSET', name, 'state', cmsgpack.pack(s), unpack(missing))
    r.state, r.place, r.seq, r.fence, r.at = BLOCKED, PARKED, next_seq(q), 0, now
    if q.sorted then count_fresh(q, r) end
    call('HSET', q.name .. '/b', id, body)
    call('ZADD', q.name .. '/blocked', text(r.seq), id)
    if next(s.d) then waits.list_held(q, id, s) end
    add(q, 'blocked', 1)
    q.fresh = q.fresh + 1
    return 'blocked'
  end

  -- Gives a blocked task another time.
  function waits.delay(q, id, at)
    local name = q.name .. '/w:' .. id
    local s = unpack_wait(call('HGET', name, 'state'))
    if not s then return end
    s.t = at
    call('HSET', name, 'state', cmsgpack.pack(s))
  end

  -- Returns the queue, the id, the record and what is known about the parents of a blocked task; nothing if it is not blocked.
  function waits.blocked_at(name)
    local q, id = home_of(name)
    local packed = q and call('HGET', q.name .. '/t', id)
    local r = packed and (read_record(packed) or found(q, id, packed))
    if r and r.state == BLOCKED then return q, id, r, unpack_wait(call('HGET', q.name .. '/w:' .. id, 'state')) end
  end

  -- Lets a blocked task go on, or ends it.
  local function go_on(q, r, id, s)
    local body = withdraw(q, r, id)
    if not body then return abandon(q, id) end -- another program has deleted it
    bytes = bytes + math.max(#body, 8192) -- at least 8192, because the commands take time as well
    local state, reason = proceed(q, r, id, body, s)
    put_down(q, id, r)
    local event = state == 'cancelled' and state or state == 'dead' and 'dead_lettered' or 'released'
    note(q, event, id, r, state, nil, nil, reason, state == 'scheduled' and text(s.t))
  end

  -- Reports a change of a parent to a child; nothing happens if this, or a later one, was reported before.
  function waits.inform(child, entry, parent, state, version, result)
    local q, id, r, s = waits.blocked_at(child)
    if not s or s.e ~= entry then return end
    local name = q.name .. '/w:' .. id
    local kept = call('HGET', name, parent)
    local place, last = string.match(kept or '-', '^(%d*):?(%d*)$')
    if not place or version < (tonumber(last) or 0) then return end
    local held, ended = next(s.d), count_end(s, parent, state)
    if held or next(s.d) then waits.list_held(q, id, s) end
    if not ended then
      call('HSET', name, parent, place .. ':' .. text(version), 'state', cmsgpack.pack(s))
      return
    end
    call('HDEL', name, parent)
    keep_input(s, name, place, result)
    if not (s.x or s.s > INPUTS or is_met(s)) then
      call('HSET', name, 'state', cmsgpack.pack(s))
      return
    end
    if r.seq <= purged_to(q) then
      call('HINCRBY', q.name, 'purged', 1)
      return end_live(q, id, r, CANCELLED, 'cancelled')
    end
    go_on(q, r, id, s)
  end

  -- Asks again what has become of the parents of a blocked task, because another program or a failover may have lost its
  -- notes, or lines: at once if they are in this partition, otherwise by lines.
  function waits.ask_again(q, id, s)
    if now < (s.z or 0) + AGAIN_AFTER or (waits.asked or 0) >= PARENTS_ASKED then return end
    local name, child = q.name .. '/w:' .. id, q.key .. '/' .. id
    local fields = call('HGETALL', q.name .. '/w:' .. id)
    s.z, waits.asked = now, (waits.asked or 0) + #fields / 2
    call('HSET', name, 'state', cmsgpack.pack(s))
    if s.b and s.o then add_line('close', child, '-', {}) end -- all partitions answer with their counts
    for i = 1, #fields, 2 do
      local parent, place = fields[i], string.match(fields[i + 1], '^%d*')
      if string.find(parent, '/', 1, true) and not call('HGET', LINES, 'end ' .. parent .. ' ' .. child) then
        local wanted = place ~= ''
        local p, result = waits.look_at(parent, child, s.e, wanted and 'li' or 'l')
        if p then
          waits.inform(child, s.e, parent, is_live(p) and ALIVE or p.state, next_number(), result)
          if not call('HGET', name, 'state') then return end -- it waits no longer
        else
          add_line('register', parent, child, {e = s.e, i = wanted or nil})
        end
      end
    end
  end

  -- Keeps the counts of a batch; it ends when it knows all partitions and all of its members have ended. `counts`: per
  -- partition its name, version, and the counts, see `kin.lua`.
  function waits.tally(batch, sealed, counts)
    local q, id, r, s = waits.blocked_at(batch)
    if not s or not s.b then return end
    for i = 1, #counts do
      local c = counts[i]
      local before = s.b[c.p]
      if not before or tonumber(before.v) < tonumber(c.v) then s.b[c.p] = c end
    end
    s.o = s.o or sealed
    local complete, failed = s.o, 0
    for _, c in pairs(s.b) do
      complete, failed = complete and c.c and c.a == c.d + c.f, failed + c.f
    end
    if complete then
      s.b, s.x = nil, failed > 0 and 'parent_ended' or nil
      if s.x or is_met(s) then
        call('HDEL', q.name .. '/w:' .. id, 'state')
        return go_on(q, r, id, s)
      end
    end
    call('HSET', q.name .. '/w:' .. id, 'state', cmsgpack.pack(s))
  end

  -- Informs the children of a parent that are in this partition, and adds lines for the others. If there are many, the rest
  -- is left to `lines`.
  local function inform_of(parent, state, result)
    local most = bytes < BYTES and math.min(AT_ONCE, left) or 0
    if most == 0 then return keep_end(parent, state, next_number(), result) end
    local some = children_of(parent, nil, most + 1)
    local version = (stays(state) or #some > most) and next_number()
    local last = #some > most and some[most]
    if last then some[most + 1] = nil end
    left = left - #some
    if #some > 0 and not stays(state) then call('ZREM', KIN, unpack(some)) end
    for i = 1, #some do
      local child, entry, kind = child_in(some[i])
      if child and sub(kind, 1, 1) == 'l' then
        waits.inform(child, entry, parent, state, version or math.huge, sub(kind, 2) == 'i' and result or nil)
      elseif child then
        version = version or next_number()
        add_end(parent, child, entry, kind, state, version, result)
      end
    end
    if last then keep_end(parent, state, version, result, stays(state) and last or nil) end
  end

  -- Informs the children of all tasks that have changed in this script. This may end children that have children as well.
  function waits.inform_children()
    local at = 1
    left = math.min(AT_ONCE * #changed_parents, MOST)
    while at <= #changed_parents do
      inform_of(unpack(changed_parents[at], 1, 3))
      at = at + 1
    end
    changed_parents = {}
  end

  return waits
end

inform_children = function() waiting().inform_children() end

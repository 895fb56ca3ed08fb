-- Storing new tasks.

-- Stores records of new tasks: ids, each followed by its record.
local function store_records(q, written)
  if not written[1] then return end
  call('HSET', q.name .. '/t', unpack(written))
  q.published = q.published + #written / 2
  q.ring = true
end

-- Stores `n` tasks of a queue, unless their ids are known. Their arguments begin at ARGV[at]; per task: id, digest of
-- 8 bytes and priority (followed by ":" not before ":" deadline, "/" tenant "/" ordering key, and a newline and rare
-- fields as JSON, see `rare_of`, if the task has one of these), body.
-- Appends an answer per task to `answers`: the number of tasks that waited before it, -1 for a duplicate, -2 for a
-- conflict, "duplicate:", "replaced:" or "not_unique:" and the id of the task that holds its unique key, or why it is
-- refused: "moved:" and the queue, "intake_paused", "batch_closed", "too_many_parents:" and the number of queues that
-- get a copy, or "capacity:" or "tenant_capacity:", the number of
-- tasks that count, ":" and the limit; then "/" and the queue, if another queue of a fan-out refuses.
-- Returns true if it answered only the first tasks, because many copies of them were stored, many tasks have their unique
-- keys, or they have many parents.
local function publish_tasks(q, at, n, answers)
  local ids, full = {}, false
  for i = 1, n do ids[i] = ARGV[at + 3 * (i - 1)] end
  if q.due <= now then rarely().promote_before(q) end -- before the records are read
  local records = (q.known or q.stored) and call('HMGET', q.name .. '/t', unpack(ids))
  local written, filled, places, answered, changing = {}, 0, {}, #answers, false

  for i = 1, n do
    local id, about, body = ids[i], ARGV[at + 1], ARGV[at + 2]
    at = at + 3
    local digest, priority = sub(about, 1, 8), sub(about, 9, 9)
    local packed = places[id] and written[places[id]] or changing and call('HGET', q.name .. '/t', id)
      or records and records[i]
    local answer = packed and rarely().look_up(q, id, packed, digest) or 0
    local rare = #about > 9 and rarely().rare_of(about)
    if rare and rare.b and answer == 0 and not q.bound then answer = rarely().refuse_member(q, id, rare.b) or 0 end
    if rare and rare.u and answer == 0 and not q.bound then
      store_records(q, written) -- it may change records: those that were read before are read again
      written, filled, places, changing = {}, 0, {}, true
      answer, full = rarely().meet(q, id, packed, rare, about, body)
    end
    if answer == 0 and q.limited then answer = rarely().refusal(q, about) or 0 end
    if answer == 0 and q.bound then
      answer, full = rarely().publish_copies(q, id, about, body)
    elseif answer == 0 then
      if packed then rarely().make_way(q, id, packed) end
      answer = q.waiting
      if rare and (rare.a or rare.b) then -- its parents may be published by the same call
        store_records(q, written)
        written, filled, places, changing = {}, 0, {}, true
      end
      if #about > 9 or q.sorted then
        local many
        packed, many = rarely().publish_unusual(q, id, digest, priority, body, about)
        full = full or many
      else
        if not string.find(q.lanes, priority, 1, true) then rarely().use_lane(q, priority) end
        if #body > LARGE then q.large = true end
        local seq = next_seq(q)
        call('XADD', stream_of(q, 's', priority), text(seq), id, body)
        packed = pack(RECORD, WAITING, FRESH, priority, 1, 0, 0, 0, seq, seq, now, digest, 0, 0, 0)
        q.waiting = q.waiting + 1
        if q.journal then
          note(q, 'published', id, {attempt = 1, losses = 0, priority = tonumber(priority)}, 'waiting')
        end
      end
      if rare and rarely().is_linked(rare) then -- the record is already written
        q.published = q.published + 1
      else
        written[filled + 1], written[filled + 2] = id, packed
        filled = filled + 2
        places[id] = filled
      end
      q.fresh, q.stored = q.fresh + 1, true
    end
    answers[answered + i] = answer
    if full then break end
  end
  store_records(q, written)
  return full
end

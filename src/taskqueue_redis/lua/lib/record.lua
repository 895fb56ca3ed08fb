-- Reading and writing records of tasks. If a task has a tenant, an ordering key, marks (see `tenants.lua`) or flags, the
-- numbers of its record are followed by two bytes of marks, one of flags, the tenant, the ordering key and the batch.

-- The record of a task that has ended keeps its tenant. In a queue with `keep_ended`, the time of its last delivery is in
-- the place of the ordering key, and the name of its last worker in the place of the batch.

-- Flags: other tasks wait for this one; it has a key of its own, see `after.lua`; it is a member of a batch; it streams
-- events, see `events.lua`.
local CHILDREN, KEPT, MEMBER, STREAMS = 1, 2, 4, 8
local UNKNOWN_PARENT, ALIVE = 0, 1 -- what is reported to children in place of a state: there is no such task; it is live again

-- Returns whether the parts of a record fit together.
local function fits(state, place, priority)
  if state < WAITING or state > BLOCKED or priority > 9 then return false end
  if state == WAITING then return place >= FRESH and place <= HELD end
  return place == ((state == SCHEDULED or state == DEAD or state == BLOCKED) and PARKED or NOWHERE)
end

-- Returns nothing if the record is missing or damaged; see `damage.lua`.
local function read_record(packed)
  if not packed or #packed < RECORD_SIZE then return end
  local state, place, priority, attempt, losses, prior, handed, seq, fence, at, digest, verb, answer, settled =
    unpack_struct(RECORD, packed)
  local marks, flags, tenant, entity, batch = 0, 0, '', '', ''
  if #packed > RECORD_SIZE then
    if #packed < RECORD_SIZE + 4 then return end
    marks, flags = unpack_struct('>HB', packed, RECORD_SIZE + 1)
    tenant, entity, batch = string.match(packed, '^([^/]*)/([^/]*)/?(.*)$', RECORD_SIZE + 4)
  end
  if not tenant or not fits(state, place, priority) then return end
  return {state = state, place = place, priority = priority, attempt = attempt, losses = losses, prior = prior,
    handed = handed, seq = seq, fence = fence, at = at, digest = digest, verb = verb, answer = answer, settled = settled,
    marks = marks, flags = flags, tenant = tenant, entity = entity, batch = batch}
end

local function write_record(r)
  local packed = pack(RECORD, r.state, r.place, r.priority, r.attempt, r.losses, r.prior, r.handed, r.seq, r.fence,
    r.at, r.digest, r.verb, r.answer, r.settled)
  if r.marks == 0 and r.flags == 0 and r.tenant == '' and r.entity == '' then return packed end
  packed = packed .. pack('>HB', r.marks, r.flags) .. r.tenant .. '/' .. r.entity
  return r.batch == '' and packed or packed .. '/' .. r.batch
end

local function has(r, flag) return floor(r.flags / flag) % 2 == 1 end

-- Reads the tenant and the marks of a record.
local function marked(packed)
  if #packed < RECORD_SIZE + 4 then return '', 0 end
  return string.match(packed, '^[^/]*', RECORD_SIZE + 4), unpack_struct('>H', packed, RECORD_SIZE + 1)
end

local function with_marks(packed, marks)
  local whose = #packed > RECORD_SIZE + 3 and sub(packed, RECORD_SIZE + 3) or '\0/'
  return sub(packed, 1, RECORD_SIZE) .. pack('>H', marks) .. whose
end

local function new_record(priority, digest, tenant, entity)
  return {state = WAITING, place = NOWHERE, priority = priority, attempt = 1, losses = 0, prior = 0, handed = 0,
    seq = 0, fence = 0, at = now, digest = digest, verb = 0, answer = 0, settled = 0,
    marks = 0, flags = 0, tenant = tenant or '', entity = entity or '', batch = ''}
end

local function is_live(r) return r.state <= SCHEDULED or r.state == BLOCKED end
local function is_over(r) return r.state ~= DEAD and not is_live(r) end

-- Parses the optional fields of a published task: not before, deadline, tenant, ordering key.
local function told_of(about)
  local not_before, deadline, tenant, entity = string.match(about, '^:(%d*):(%d*)/?([^/\n]*)/?([^\n]*)', 10)
  return not_before or '', deadline or '', tenant or '', entity or ''
end

local function put_down(q, id, r) call('HSET', q.name .. '/t', id, write_record(r)) end

-- Sorted lanes of a queue that has fair order or has seen an ordering key. Waiting entries are in a stream, as in other
-- queues, and also in a lane per priority and tenant (`/y`), a sorted set by position whose members name the kind of
-- stream and the sequence number. Entries are taken from the lanes and claimed with XCLAIM, so the consumer groups of
-- the streams do not advance.
-- `/w`: the tenants with lanes, by the position of their first entry or an earlier position. `/g`: the tenants that
-- take turns, by what they have spent. Both may contain tenants whose lanes are empty by now. `/v`: the tenants that
-- are paused or have reached a limit, by the time at which that may change. `/h`: the holder of each ordering key.
-- `/j:` and a key: the tasks that wait for this ordering key. `/J`: the tasks that wait for any ordering key.

local function marks_of(q, r)
  local marks = r.marks % 4
  return marks > 0 and floor(r.marks / 4) == flow_of(q).epoch and marks or 0
end

local function mark(q, r, marks) r.marks = 4 * flow_of(q).epoch + marks end

local function count_fresh(q, r)
  if flow_of(q).epoch > 0 and is_fresh(r) and marks_of(q, r) == 0 then
    mark(q, r, 1)
    note_tenant(q, r.tenant, 1, 0)
  end
end

local function uncount_fresh(q, r)
  if marks_of(q, r) == 1 then note_tenant(q, r.tenant, -1, 0) end
  r.marks = 0
end

local function leave_fresh(q, r)
  if is_fresh(r) then q.fresh = q.fresh - 1 end
  uncount_fresh(q, r)
end

local function lane_of(q, priority, tenant) return q.name .. '/y' .. priority .. ':' .. tenant end

-- What a tenant has spent is counted in fractions of a turn. A tick is added, so that tenants that have spent the same
-- are in the order in which they came.
local TURN, TICKS = 16384, 65536

local function spend(q, spent, tenant, turns)
  local f = flow_of(q)
  f.tick = (f.tick + 1) % TICKS
  q.flow_changed, q.save = true, save_order
  local cost = TURN * turns
  if f.weighted % 2 == 1 and tenant then
    local weight = math.abs(weight_of(q, tenant))
    if weight >= 1 and weight <= 1000 then cost = floor(cost / weight + 0.5) end -- others are damaged
  end
  return (floor(spent / TICKS) + cost) * TICKS + f.tick
end

-- Adds a tenant to the rotation, one turn behind the tenant that is next.
local function join(q, priority, tenant)
  if flow_of(q).fair == 0 then return end
  if has_tenant_limits(q) then
    if call('ZSCORE', q.name .. '/v', tenant) then return end
    q.opened = true -- the other tenants of the rotation may have reached their limits
  end
  local name = q.name .. '/g' .. priority
  local first = call('ZRANGE', name, 0, 0, 'WITHSCORES')[2]
  call('ZADD', name, spend(q, first or 0, tenant, first and 1 or 0), tenant)
end

-- Redelivered entries come before all entries that were never delivered.
local RETURNED = 2 ^ 51

local function member_of(r) return kind_of(r) .. text(r.fence) end

local function enter_lane(q, r, returned)
  local place = text(returned and r.seq - RETURNED or r.seq)
  local name = lane_of(q, r.priority, r.tenant)
  call('ZADD', q.name .. '/w' .. r.priority, 'LT', place, r.tenant) -- first, so that `repair` finds the lane
  local added = call('ZADD', name, place, member_of(r)) -- 0 if the tenant in the record was changed by another program
  q.laned = q.laned + added
  if added == 0 or call('ZCARD', name) == 1 then join(q, r.priority, r.tenant) end
end

-- The first task with an ordering key holds it until it has ended or become a dead letter. Returns whether this task
-- must wait for the key.
local function is_held(q, r, id)
  if r.entity == '' then return false end
  local holder = call('HGET', q.name .. '/h', r.entity)
  if holder and holder ~= id then return true end
  call('HSET', q.name .. '/h', r.entity, id)
  return false
end

local function hold(q, r, id, body)
  r.place, r.fence = HELD, 0
  call('HSET', q.name .. '/b', id, body)
  call('ZADD', q.name .. '/j:' .. r.entity, text(r.seq), id)
  call('ZADD', q.name .. '/J', text(r.seq), id)
  q.held = q.held + 1
end

-- Adds an entry that becomes available, for the first time or again. The entry may have to wait for its ordering key.
local function enter_sorted(q, r, id, body, deadline, returned)
  count_fresh(q, r)
  if is_held(q, r, id) then return hold(q, r, id, body) end
  r.place, r.fence = returned and AGAIN or FRESH, returned and next_seq(q) or r.seq
  enter_stream(q, r, id, body, deadline)
  enter_lane(q, r, returned)
end

local LOOKED_AT = 500 -- maximum of `q.looked`: number of tenants that this script has checked without finding a task

-- Removes a tenant without entries. This is done when its turn comes, or once the queue has no entries left.
local function leave_walk(q, priority, tenant)
  q.looked = q.looked + 1
  call('ZREM', q.name .. '/w' .. priority, tenant)
  call('ZREM', q.name .. '/g' .. priority, tenant)
end

local function left_lanes(q, n)
  q.laned = q.laned - n
  if q.laned > 0 then return end
  for i = 1, #q.lanes do
    local priority = sub(q.lanes, i, i)
    call('UNLINK', q.name .. '/w' .. priority, q.name .. '/g' .. priority)
  end
end

-- Returns the tenant that has the first entry of this priority, the position of that entry, and the position of the
-- next tenant; nothing if there is no entry. After too many tenants without entries, returns no tenant, and a position
-- that is not after the first entry.
local function first_tenant(q, priority)
  local name = q.name .. '/w' .. priority
  for _ = 0, LOOKED_AT do
    local heads = call('ZRANGE', name, 0, 1, 'WITHSCORES')
    if not heads[1] then return end
    local head = call('ZRANGE', lane_of(q, priority, heads[1]), 0, 0, 'WITHSCORES')[2]
    if head == heads[2] then return heads[1], head, heads[4] end
    if q.looked >= LOOKED_AT then return nil, heads[2] end
    q.looked = q.looked + 1
    if head then call('ZADD', name, head, heads[1]) else leave_walk(q, priority, heads[1]) end
  end
end

local function leave_lane(q, r)
  if call('ZREM', lane_of(q, r.priority, r.tenant), member_of(r)) == 1 then left_lanes(q, 1) end
end

local function leave_held(q, r, id)
  call('ZREM', q.name .. '/j:' .. r.entity, id)
  call('ZREM', q.name .. '/J', id)
  q.held = q.held - 1
end

-- Lets a tenant that had reached a limit take turns again, because it may now be below the limit.
local function wake_tenant(q, tenant)
  if call('ZREM', q.name .. '/v', tenant) == 0 then return end
  for i = 1, #q.lanes do
    local priority = sub(q.lanes, i, i)
    if call('ZSCORE', q.name .. '/w' .. priority, tenant) then join(q, priority, tenant) end
  end
end

-- Counts the end of a delivery for its tenant.
local function land(q, r)
  local counted = marks_of(q, r) == 2
  r.marks = 0
  if not counted then return end
  note_tenant(q, r.tenant, 0, -1)
  if flow_of(q).tenant_inflight > 0 then wake_tenant(q, r.tenant) end
end

-- Returns to plain lanes once sorted lanes are no longer needed: from now on the consumer groups advance again. If a
-- group is missing although its stream has entries, the queue stays sorted, so that no entry is skipped.
local function unsort(q)
  if not q.sorted or flow_of(q).fair == 1 or q.waiting > 0 or call('EXISTS', q.name .. '/h') == 1 then return end
  for i = 1, #q.lanes do
    for _, kind in ipairs({'s', 'r'}) do
      local lane = kind .. sub(q.lanes, i, i)
      if not move_on(q.name .. '/' .. lane, text(q.last)) and call('XLEN', q.name .. '/' .. lane) > 0 then return end
      call('HSET', q.name, lane, text(q.last))
    end
  end
  q.sorted = false
end

-- The tenants of a queue whose lanes are sorted: how many of their tasks were never handed out, how many are in flight, and
-- their tokens. One of whom nothing is left is forgotten. The marks of a record say for what it counts: 1 never handed out, 2 in flight.
local TENANT = '<dddd'

local function save_order(q)
  if q.flow_changed then save_flow(q) end
  local f = flow_of(q)
  for tenant, s in pairs(q.tenants or {}) do
    if s.changed then
      local rate = f.tenant_tokens > 0
      if rate then fill(s, f.tenant_tokens, f.tenant_period) end
      local idle = s.fresh <= 0 and s.in_flight <= 0
      if idle and (not rate or s.tokens >= f.tenant_tokens) then
        call('HDEL', q.name .. '/T', tenant)
      else
        call('HSET', q.name .. '/T', tenant, pack(TENANT, s.fresh, s.in_flight, s.tokens, s.at))
        if idle then
          call('ZADD', q.name .. '/u', math.ceil(now + f.tenant_period * (1 - s.tokens / f.tenant_tokens)), tenant)
        end
      end
    end
  end
  q.flow_changed, q.tenants, q.save = false, nil, nil
end

local function tenant_of(q, tenant)
  q.tenants = q.tenants or {}
  local s = q.tenants[tenant]
  if s then return s end
  local f = flow_of(q)
  s = {fresh = 0, in_flight = 0, tokens = f.tenant_tokens, at = now}
  local packed = call('HGET', q.name .. '/T', tenant)
  if packed then
    s.fresh, s.in_flight, s.tokens, s.at = unpack_struct(TENANT, packed)
    if s.at <= f.changed then -- what was saved up until then counts at the old rate
      if f.old_tokens > 0 then
        s.tokens = math.min(s.tokens + (f.changed - s.at) * f.old_tokens / f.old_period, f.old_tokens, f.tenant_tokens)
      else
        s.tokens = f.tenant_tokens
      end
      s.at = f.changed + 1
    end
  end
  q.tenants[tenant] = s
  return s
end

local function note_tenant(q, tenant, fresh, in_flight)
  local s = tenant_of(q, tenant)
  s.fresh, s.in_flight, s.changed = s.fresh + fresh, s.in_flight + in_flight, true
  q.save = save_order
  return s
end

-- Forgets tenants who had nothing left but a bucket that was not full.
local function forget_idle(q)
  local ids = call('ZRANGEBYSCORE', q.name .. '/u', '-inf', text(now), 'LIMIT', 0, 20)
  for i = 1, #ids do
    call('ZREM', q.name .. '/u', ids[i])
    note_tenant(q, ids[i], 0, 0)
  end
end

local function has_tenant_limits(q)
  local f = flow_of(q)
  return f.tenant_inflight > 0 or f.tenant_tokens > 0
end

-- As `room`, for one tenant. Infinite: when one of the tenant's deliveries ends.
local function tenant_room(q, tenant)
  local f = flow_of(q)
  if not has_tenant_limits(q) then return math.huge end
  local s = tenant_of(q, tenant)
  local places = f.tenant_inflight > 0 and f.tenant_inflight - s.in_flight or math.huge
  if places <= 0 then return 0, math.huge end
  if f.tenant_tokens == 0 then return places end
  local tokens, opens_at = allowed(s, f.tenant_tokens, f.tenant_period)
  return math.min(places, tokens), opens_at
end

-- Why a task is not taken in; nothing where it is.
local function refusal(q, about)
  local f = flow_of(q)
  if f.moved == 1 then return 'moved:' .. call('HGET', q.name, 'moved_to') end
  if f.intake_paused == 1 then return 'intake_paused' end
  if f.capacity > 0 and q.fresh >= f.capacity then return 'capacity:' .. text(q.fresh) .. ':' .. text(f.capacity) end
  if f.tenant_capacity > 0 then
    local _, _, tenant = told_of(about)
    local fresh = tenant_of(q, tenant).fresh
    if fresh >= f.tenant_capacity then
      return 'tenant_capacity:' .. text(fresh) .. ':' .. text(f.tenant_capacity)
    end
  end
end

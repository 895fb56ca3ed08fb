-- The tenants of a queue that limits them: how many of their tasks were never delivered, how many are in flight, and
-- the tokens of their rate limits. A tenant is deleted once it has no such tasks and all of its tokens.
-- The marks of a record are a number: 1 if its task is counted as never delivered, 2 if as in flight, plus 4 times the
-- version of the settings since which tenants are counted. Counting begins again when such limits are set.
local TENANT = '<ddddd'

local function save_order(q)
  if q.flow_changed then save_flow(q) end
  local f, written, gone = flow_of(q), {}, {}
  for tenant, s in pairs(q.tenants or {}) do
    if s.changed then
      local rate = f.tenant_tokens > 0
      if rate then fill(s, f.tenant_tokens, f.tenant_period) end
      local idle = s.fresh <= 0 and s.in_flight <= 0
      if idle and (not rate or s.tokens >= f.tenant_tokens) then
        gone[#gone + 1] = tenant
      else
        written[#written + 1], written[#written + 2] = tenant, pack(TENANT, s.fresh, s.in_flight, s.tokens, s.at,
          f.rates)
        if idle then
          call('ZADD', q.name .. '/u', math.ceil(now + f.tenant_period * (1 - s.tokens / f.tenant_tokens)), tenant)
        end
      end
    end
  end
  -- Lua can pass only some thousands of values to a command.
  for i = 1, #written, 1000 do call('HSET', q.name .. '/T', unpack(written, i, math.min(i + 999, #written))) end
  for i = 1, #gone, 1000 do call('HDEL', q.name .. '/T', unpack(gone, i, math.min(i + 999, #gone))) end
  q.flow_changed, q.tenants, q.save = false, nil, nil
end

local function read_tenant(f, packed)
  local s, rates = {fresh = 0, in_flight = 0, tokens = f.tenant_tokens, at = now}, nil
  if not packed or #packed < 40 then return s end
  s.fresh, s.in_flight, s.tokens, s.at, rates = unpack_struct(TENANT, packed)
  if rates < f.rates then -- tokens until the change were earned at the old rate
    if f.old_tokens > 0 then
      s.tokens = math.min(s.tokens + math.max(0, f.changed - s.at) * f.old_tokens / f.old_period, f.old_tokens, f.tenant_tokens)
    else
      s.tokens = f.tenant_tokens
    end
    s.at = f.changed
  end
  return s
end

-- Reads several tenants with one command.
local function read_tenants(q, tenants)
  local found = call('HMGET', q.name .. '/T', unpack(tenants))
  q.tenants = q.tenants or {}
  for i = 1, #tenants do
    q.tenants[tenants[i]] = q.tenants[tenants[i]] or read_tenant(flow_of(q), found[i])
  end
end

local function tenant_of(q, tenant)
  if not (q.tenants and q.tenants[tenant]) then read_tenants(q, {tenant}) end
  return q.tenants[tenant]
end

local function note_tenant(q, tenant, fresh, in_flight)
  local s = tenant_of(q, tenant)
  s.fresh, s.in_flight, s.changed = s.fresh + fresh, s.in_flight + in_flight, true
  q.save = save_order
  return s
end

-- Deletes tenants that were only kept until they had all their tokens again.
local function forget_idle(q)
  local ids = call('ZRANGEBYSCORE', q.name .. '/u', '-inf', text(now), 'LIMIT', 0, 20)
  for i = 1, #ids do
    call('ZREM', q.name .. '/u', ids[i])
    note_tenant(q, ids[i], 0, 0)
  end
end

-- `weighted` is 1 if tenants have weights, plus 2 if some are paused. The weight of a paused tenant is negative; a tenant
-- that is not stored has the weight 1.
local function read_weights(q, tenants)
  local found = call('HMGET', q.name .. '/W', unpack(tenants))
  q.weights = q.weights or {}
  for i = 1, #tenants do q.weights[tenants[i]] = tonumber(found[i] or 1) or 1 end
end

local function weight_of(q, tenant)
  if not (q.weights and q.weights[tenant]) then read_weights(q, {tenant}) end
  return q.weights[tenant]
end

local function has_tenant_limits(q)
  local f = flow_of(q)
  return f.tenant_inflight > 0 or f.tenant_tokens > 0 or f.weighted > 1
end

-- Like `room`, for one tenant. An infinite time means: when one of the tenant's deliveries ends, or it is resumed.
local function tenant_room(q, tenant)
  local f = flow_of(q)
  if not has_tenant_limits(q) then return math.huge end
  if f.weighted > 1 then
    if weight_of(q, tenant) < 0 then return 0, math.huge end
    if f.tenant_inflight + f.tenant_tokens == 0 then return math.huge end
  end
  local s = tenant_of(q, tenant)
  local places = f.tenant_inflight > 0 and f.tenant_inflight - s.in_flight or math.huge
  if places <= 0 then return 0, math.huge end
  if f.tenant_tokens == 0 then return places end
  local tokens, opens_at = allowed(s, f.tenant_tokens, f.tenant_period)
  return math.min(places, tokens), opens_at
end

-- Returns why a task is refused; nothing if it is accepted.
local function refusal(q, about)
  local f = flow_of(q)
  local moved_to = f.moved == 1 and call('HGET', q.name, 'moved_to')
  if moved_to then return 'moved:' .. moved_to end
  if f.intake_paused == 1 or f.moved == 1 then return 'intake_paused' end
  if f.capacity > 0 and q.fresh >= f.capacity then return 'capacity:' .. text(q.fresh) .. ':' .. text(f.capacity) end
  if f.tenant_capacity > 0 then
    local _, _, tenant = told_of(about)
    local fresh = tenant_of(q, tenant).fresh
    if fresh >= f.tenant_capacity then
      return 'tenant_capacity:' .. text(fresh) .. ':' .. text(f.tenant_capacity)
    end
  end
end

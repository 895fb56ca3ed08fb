-- The limits of a queue that has any, and the state of its rate limit, packed in one string.
local FLOW = '<ddddddddddddddddddddddddd'
local FLOW_SIZE = 200
local FLOWS = {'capacity', 'max_inflight', 'max_tokens', 'period', 'paused', 'intake_paused', 'moved', 'processing', 'fair',
  'weighted', 'tenant_capacity', 'tenant_inflight', 'tenant_tokens', 'tenant_period', 'floor', 'timeout', 'tokens',
  'at', 'owed', 'tick', 'old_tokens', 'old_period', 'changed', 'rates', 'epoch'}
  -- The last fields: the tenants' rate before it was changed, when and how often it was changed; and the version of the
  -- settings since which tenants are counted.
local TOKEN = 1 - 1e-6 -- tolerance for rounding errors

-- Returns limits by name; nothing if a number is missing or not finite, or if there is no limit, which is damage, too.
local function limits_in(values)
  local f, limited = {}, false
  for i = 1, #FLOWS do
    local value = tonumber(values[i])
    if not (value and value > -1 and value < math.huge) then return end
    f[FLOWS[i]] = value
    limited = limited or (value > 0 and i <= 16) -- the other fields are no settings
  end
  return limited and f
end

local function numbers_of(f)
  local values = {}
  for i = 1, #FLOWS do values[i] = f[FLOWS[i]] end
  return values
end

local function save_flow(q) call('SET', q.name .. '/f', pack(FLOW, unpack(numbers_of(q.flow)))) end

-- Stores a copy of the limits with the settings, for `restore_flow`.
local function copy_flow(q)
  local values = numbers_of(q.flow)
  for i = 1, #values do values[i] = string.format('%.17g', values[i]) end
  call('HSET', q.name, 'limits', '[' .. table.concat(values, ',') .. ']')
end

-- Restores damaged limits from their copy. Rate limits begin without tokens. Without a copy, the queue is paused until
-- maintenance has applied the settings again.
local function restore_flow(q)
  local stopped, sound, values = {}, pcall(cjson.decode, call('HGET', q.name, 'limits') or '')
  for i = 1, #FLOWS do stopped[i] = (FLOWS[i] == 'paused' or FLOWS[i] == 'intake_paused') and 1 or 0 end
  q.flow = sound and type(values) == 'table' and limits_in(values) or limits_in(stopped)
  q.flow.tokens, q.flow.at = 0, now
  call('DEL', q.name .. '/f') -- not refused if Redis has no memory left, and then the others are not refused either
  call('HINCRBY', META, 'anomalies', 1)
  call('RPUSH', PARTITION .. ':damaged', q.key .. ' /')
  save_flow(q)
end

local function flow_of(q)
  if q.flow then return q.flow end
  if q.limited then
    local packed = call('GET', q.name .. '/f')
    q.flow = packed and #packed == FLOW_SIZE and limits_in({unpack_struct(FLOW, packed)})
    if not q.flow then restore_flow(q) end
  else
    q.flow = {}
    for i = 1, #FLOWS do q.flow[FLOWS[i]] = 0 end
  end
  return q.flow
end

-- Returns the timeout of an attempt, in microseconds; "" if there is none.
local function timeout_of(q)
  local timeout = flow_of(q).timeout
  return timeout > 0 and text(timeout) or ''
end

-- A token bucket for a rate limit. It holds at most `most` tokens and is filled within `period`.

local function fill(bucket, most, period)
  if now <= bucket.at then return end
  bucket.tokens = math.min(most, bucket.tokens + (now - bucket.at) * most / period)
  bucket.at = now
end

-- Returns how many deliveries the whole tokens allow; if none, also when the next token is available.
local function allowed(bucket, most, period)
  fill(bucket, most, period)
  if bucket.tokens >= TOKEN then return floor(bucket.tokens + 1 - TOKEN) end
  return 0, math.ceil(bucket.at + (1 - bucket.tokens) * period / most)
end

-- Returns how many deliveries the limits allow now, and when a rate limit allows the next one.
local function room(q)
  local f = flow_of(q)
  local places = f.max_inflight > 0 and math.max(0, f.max_inflight - q.in_flight) or math.huge
  if f.max_tokens > 0 then fill(f, f.max_tokens, f.period) end
  if f.paused == 1 then return 0 end
  if f.max_tokens == 0 or places == 0 then return places end
  local tokens, opens_at = allowed(f, f.max_tokens, f.period)
  return math.min(places, tokens), opens_at
end

local function take_tokens(q, n)
  local f = q.flow
  if f.max_tokens > 0 then
    f.tokens = f.tokens - n
    save_flow(q)
  end
end

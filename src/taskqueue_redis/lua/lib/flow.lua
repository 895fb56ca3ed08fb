-- The limits of a queue that has any, and the state of its rate limit, packed in one string.
local FLOW = '<dddddddddddddddddddddddd'
local FLOWS = {'capacity', 'max_inflight', 'max_tokens', 'period', 'paused', 'intake_paused', 'moved', 'processing', 'fair',
  'weighted', 'tenant_capacity', 'tenant_inflight', 'tenant_tokens', 'tenant_period', 'floor', 'tokens', 'at', 'owed', 'tick',
  'old_tokens', 'old_period', 'changed', 'rates', 'epoch'}
  -- The last fields: the tenants' rate before it was changed, when and how often it was changed; and the version of the
  -- settings since which tenants are counted.
local TOKEN = 1 - 1e-6 -- tolerance for rounding errors

local function flow_of(q)
  if q.flow then return q.flow end
  local f, packed = {}, q.limited and call('GET', q.name .. '/f')
  local values = packed and #packed == 192 and {unpack_struct(FLOW, packed)}
  if packed and not values then -- damaged: maintenance applies the settings again
    call('HINCRBY', META, 'anomalies', 1)
    call('RPUSH', PARTITION .. ':damaged', q.key .. ' /')
    call('DEL', q.name .. '/f')
  end
  for i = 1, #FLOWS do f[FLOWS[i]] = values and values[i] or 0 end
  q.flow = f
  return f
end

local function save_flow(q)
  local f, values = q.flow, {}
  for i = 1, #FLOWS do values[i] = f[FLOWS[i]] end
  call('SET', q.name .. '/f', pack(FLOW, unpack(values)))
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

-- The limits of a queue that has any, and what they have left, packed in one string.
local FLOW = '<dddddddddddddddddddddddd'
local FLOWS = {'capacity', 'max_inflight', 'max_tokens', 'period', 'paused', 'intake_paused', 'moved', 'processing', 'fair',
  'weighted', 'tenant_capacity', 'tenant_inflight', 'tenant_tokens', 'tenant_period', 'floor', 'tokens', 'at', 'owed', 'tick',
  'old_tokens', 'old_period', 'changed', 'rates', 'epoch'} -- the last: the rate of tenants before it was changed, when that was, how
  -- often; and since which version of the settings tenants are counted
local TOKEN = 1 - 1e-6 -- what floating point leaves out of a token is forgiven

local function flow_of(q)
  if q.flow then return q.flow end
  local f, packed = {}, q.limited and call('GET', q.name .. '/f')
  local values = packed and {unpack_struct(FLOW, packed)}
  for i = 1, #FLOWS do f[FLOWS[i]] = values and values[i] or 0 end
  q.flow = f
  return f
end

local function save_flow(q)
  local f, values = q.flow, {}
  for i = 1, #FLOWS do values[i] = f[FLOWS[i]] end
  call('SET', q.name .. '/f', pack(FLOW, unpack(values)))
end

-- A bucket: so many tokens at a time. It holds so many at the most, and is filled in a period.

local function fill(bucket, most, period)
  if now <= bucket.at then return end
  bucket.tokens = math.min(most, bucket.tokens + (now - bucket.at) * most / period)
  bucket.at = now
end

-- How many deliveries its whole tokens allow, and when there is one where there is none.
local function allowed(bucket, most, period)
  fill(bucket, most, period)
  if bucket.tokens >= TOKEN then return floor(bucket.tokens + 1 - TOKEN) end
  return 0, math.ceil(bucket.at + (1 - bucket.tokens) * period / most)
end

-- How many deliveries may be handed out now, and when that may change by time alone.
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

-- The limits of a queue that has any, and what they have left, packed in one string.
local FLOW, TOKEN = '<dddddddd', 1 - 1e-6 -- what floating point leaves out of a token is forgiven

local function flow_of(q)
  if q.flow then return q.flow end
  local f = {capacity = 0, max_inflight = 0, max_tokens = 0, period = 0, paused = 0, intake_paused = 0, tokens = 0, at = 0}
  local packed = q.limited and call('GET', q.name .. '/f')
  if packed then
    f.capacity, f.max_inflight, f.max_tokens, f.period, f.paused, f.intake_paused, f.tokens, f.at =
      unpack_struct(FLOW, packed)
  end
  q.flow = f
  return f
end

local function save_flow(q)
  local f = q.flow
  call('SET', q.name .. '/f', pack(FLOW, f.capacity, f.max_inflight, f.max_tokens, f.period, f.paused, f.intake_paused,
    f.tokens, f.at))
end

-- Why a task is not taken in; nothing where it is.
local function refusal(q)
  local f = flow_of(q)
  if f.intake_paused == 1 then return 'intake_paused' end
  if f.capacity > 0 and q.fresh >= f.capacity then return text(q.fresh) .. ':' .. text(f.capacity) end
end

-- How many deliveries may be handed out now, and when that may change by time alone.
local function room(q)
  local f = flow_of(q)
  local places = f.max_inflight > 0 and math.max(0, f.max_inflight - q.in_flight) or math.huge
  if f.max_tokens > 0 and now > f.at then
    f.tokens = math.min(f.max_tokens, f.tokens + (now - f.at) * f.max_tokens / f.period)
    f.at = now
  end
  if f.paused == 1 then return 0 end
  if f.max_tokens == 0 then return places end
  if places == 0 or f.tokens >= TOKEN then return math.min(places, math.floor(f.tokens + 1 - TOKEN)) end
  return 0, math.ceil(f.at + (1 - f.tokens) * f.period / f.max_tokens)
end

local function take_tokens(q, n)
  local f = q.flow
  if f.max_tokens > 0 then
    f.tokens = f.tokens - n
    save_flow(q)
  end
end

--@ base room slots
-- Binds leases to jobs. ARGV: duration of the leases in microseconds, then per pair token, model of the lease, job.
-- Returns the epoch, and per pair the endpoint's id, fence, server, URL, the packed lease, and the note for its holder;
-- nothing if the token is stale.
local ttl, answers = tonumber(ARGV[3]), {}
lift_refusal()
demand_pool()
sweep(SWEPT)

local function extend(p, l)
  set_state(p, l, ASSIGNED)
  l.expires, l.missed = now + ttl, -1
  date(p, l)
  return told(p, l, keep(p, l))
end

local function bind(p, l, job)
  local s = server_of(p.server)
  call('ZREM', p.name .. ':u', l.fence)
  if p.reports then undate(p, l) end
  call('HSET', JOBS, named(p.model, job), p.id .. ':' .. l.fence)
  l.job, l.switched, l.resumed = job, s.last ~= '' and s.last ~= p.model, #late_of(p.model, job) > 0
  note_model(p)
  return extend(p, l)
end

-- Moves the lease that the job already has to the holder of `by`, the lease of the token.
local function take_over(p, l, by)
  call('HDEL', p.name, l.fence)
  undate(p, l)
  l.fence = next_fence()
  l.secret, l.holder, l.resumed = secret_of(by.secret, l.fence), by.holder, true
  call('HSET', JOBS, named(p.model, l.job), p.id .. ':' .. l.fence)
  return extend(p, l)
end

for i = 4, #ARGV, 3 do
  local token, model, job = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local p, l = current(token)
  local answer = false
  if not l then
    local _, _, random = parts_of(token)
    local presented = match(random or '', '^%d+x(%x+)$')
    local q, other = lease_of(model, job)
    if other and presented and other.secret == secret_of(presented, other.fence) then answer = extend(q, other) end
  elseif l.job == job then
    answer = extend(p, l)
  elseif l.job == '' then
    local q, other = lease_of(p.model, job)
    if other then
      answer = take_over(q, other, l)
      finish(p, l, false)
    else
      answer = bind(p, l, job)
    end
  end
  answers[#answers + 1] = answer
end
save_places()
return {EPOCH, answers}

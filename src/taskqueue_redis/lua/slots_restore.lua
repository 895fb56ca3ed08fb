--@ base room slots
-- Recreates leases that an earlier, lost pool had granted. ARGV: duration of the leases in microseconds, then per lease
-- its token, model, server, holder, job, state, and 1 if its server had another model before.
-- Returns the same as `slots_assign`.
local ttl, answers = tonumber(ARGV[3]), {}
lift_refusal()
demand_pool()
sweep(SWEPT)
for i = 4, #ARGV, 7 do
  local epoch, _, seed = parts_of(ARGV[i])
  local model, job = ARGV[i + 1], ARGV[i + 4]
  local answer = false
  local q, other = lease_of(model, job)
  if epoch and epoch ~= EPOCH then
    local p = not other and place_of(model, ARGV[i + 2])
    if p then
      local number, state = next_fence(), tonumber(ARGV[i + 5])
      other = {
        fence = number, state = state, switched = ARGV[i + 6] == '1', resumed = false, noted = false, expires = now + ttl, since = now,
        missed = -1, missed_at = 0, secret = secret_of(seed, number), holder = ARGV[i + 3], job = job,
      }
      count(p, state, 1)
      note_model(p)
      call('HSET', JOBS, named(model, job), p.id .. ':' .. number)
      date(p, other)
      answer = told(p, other, keep(p, other))
    elseif other and other.secret == secret_of(seed, other.fence) then -- the answer to an earlier call was lost
      other.expires = math.max(other.expires, now + ttl)
      date(q, other)
      answer = told(q, other, keep(q, other))
    end
  end
  answers[#answers + 1] = answer
end
save_places()
return {EPOCH, answers}

--@ base room slots
-- Extends leases. ARGV: duration of the leases in microseconds, "1" to detach their jobs from the holder, tokens.
-- Returns the epoch, and per token the same as `slots_assign`, or 1 if the token belongs to another pool.
local ttl, detached, answers = tonumber(ARGV[3]), ARGV[4] == '1', {}
lift_refusal()
demand_pool()
sweep(SWEPT)
for i = 5, #ARGV do
  local p, l = current(ARGV[i])
  local answer = false
  if not l then
    local epoch = parts_of(ARGV[i])
    if epoch and epoch ~= EPOCH then answer = 1 end
  elseif not detached or l.job ~= '' then
    if detached then
      set_state(p, l, DETACHED)
      l.expires = now + ttl
    else
      l.expires = math.max(l.expires, now + ttl)
    end
    date(p, l)
    answer = told(p, l, keep(p, l))
  end
  answers[#answers + 1] = answer
end
save_places()
return {EPOCH, answers}

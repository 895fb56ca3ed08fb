--@ base room schedules
-- Lists schedules, sorted by name. ARGV: first and last member, as ZRANGE BYLEX takes them, and how many at most.
-- Returns field, record and specification of each; fewer schedules if they are large, and none at the end.
lift_refusal()
local answer, from = {}, ARGV[3]
for _ = 1, 100 do -- more than once only if another program has changed the list, so that schedules are missing
  local fields = call('ZRANGE', NAMES, from, ARGV[4], 'BYLEX', 'LIMIT', 0, ARGV[5])
  append_schedules(answer, fields)
  if #answer > 0 or #fields == 0 then break end
  from = '(' .. fields[#fields]
end
return answer

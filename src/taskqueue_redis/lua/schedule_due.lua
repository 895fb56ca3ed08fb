--@ base room schedules
-- Returns the time, when the first schedule fires that is not in the answer ("" if there is none), then field, record
-- without outcomes and specification of each schedule that is due, the earliest first; fewer of them if they are large.
-- ARGV: how many at most.
lift_refusal()
local limit = tonumber(ARGV[3])
local due = call('ZRANGEBYSCORE', DUE, '-inf', text(now), 'WITHSCORES', 'LIMIT', 0, limit + 1)
local fields, answer = {}, {text(now), ''}
for i = 1, math.min(limit, #due / 2) do fields[i] = due[2 * i - 1] end
local read = append_schedules(answer, fields, true)
local following = due[2 * read + 2] or call('ZRANGEBYSCORE', DUE, '(' .. text(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
answer[2] = following and text(following) or ''
return answer

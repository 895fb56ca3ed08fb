-- The schedules of the partition. Fields and members are the name of a schedule, a space, and the key of its queue. A
-- space sorts before all characters of names, so the members are sorted by name.
local SCHEDULES, SPECS = PARTITION .. ':schedules', PARTITION .. ':schedules:specs'
local DUE, NAMES = PARTITION .. ':schedules:due', PARTITION .. ':schedules:names'

-- Returns the version of a schedule, when it fires next ("" if it does not), its outcomes, one per line, and the line of
-- the last attempt if its task was refused (else ""), from its record; nothing if there is none.
local function parse_schedule(packed)
  if not packed then return end
  local version, next_at, refused, outcomes = string.match(packed, '^(%d+):(%d*):?([^\n]*)\n(.*)$')
  return version, next_at, outcomes, refused
end

local function read_schedule(field) return parse_schedule(call('HGET', SCHEDULES, field)) end

-- Changes a schedule that is stored already.
local function change_schedule(field, version, next_at, outcomes, refused)
  local head = version .. ':' .. next_at .. (refused ~= '' and ':' .. refused or '')
  call('HSET', SCHEDULES, field, head .. '\n' .. outcomes)
  if next_at ~= '' then call('ZADD', DUE, next_at, field) else call('ZREM', DUE, field) end
end

local function write_schedule(field, version, next_at, outcomes, refused)
  change_schedule(field, version, next_at, outcomes, refused)
  call('ZADD', NAMES, 0, field)
end

-- Returns 1 if there was one.
local function delete_schedule(field)
  call('HDEL', SCHEDULES, field)
  call('ZREM', DUE, field)
  call('ZREM', NAMES, field)
  return call('HDEL', SPECS, field)
end

-- Returns a version that no schedule of the partition has had. If another program has deleted the last one, continue
-- with the number of seconds, which is larger.
local function new_version()
  local last = tonumber(call('HGET', META, 'schedules'))
  if not last then last = call('EXISTS', SCHEDULES) == 1 and floor(now / 1000000) or 0 end
  call('HSET', META, 'schedules', text(last + 1))
  return text(last + 1)
end

-- Checks a schedule whose data another program may have changed. A lost record is written again, with the time in the
-- index, which is later than in the record if an instant was not fired. A schedule without a specification is deleted.
-- Returns whether it was damaged.
local function mend_schedule(field)
  local version, next_at, outcomes, refused = read_schedule(field)
  local due = call('ZSCORE', DUE, field)
  local deferred = version and due and next_at ~= '' and tonumber(due) > tonumber(next_at) and tonumber(due) <= now + 10000000
  local spec = call('HGET', SPECS, field)
  bytes = bytes + #(spec or '')
  if not spec then
    delete_schedule(field)
  elseif not version then
    write_schedule(field, new_version(), due and text(due) or '', '', '')
  elseif not deferred and next_at ~= (due and text(due) or '') or not call('ZSCORE', NAMES, field) then
    write_schedule(field, version, next_at, outcomes, refused)
  else
    return false
  end
  call('HINCRBY', META, 'anomalies', 1)
  redis.pcall('RPUSH', PARTITION .. ':damaged', '/schedule ' .. field)
  return true
end

-- Appends schedules to an answer: field, record (without outcomes if `plain`), specification. Returns how many of
-- `fields` it has read.
local function append_schedules(answer, fields, plain)
  for i = 1, #fields do
    local record = call('HGET', SCHEDULES, fields[i])
    local spec = parse_schedule(record) and call('HGET', SPECS, fields[i])
    if not spec and mend_schedule(fields[i]) then
      record, spec = call('HGET', SCHEDULES, fields[i]), call('HGET', SPECS, fields[i])
    end
    if spec then
      local n = #answer
      if plain then record = string.match(record, '^[^\n]*\n') end
      answer[n + 1], answer[n + 2], answer[n + 3] = fields[i], record, spec
      bytes = bytes + #record + #spec
      if bytes >= BYTES then return i end
    end
  end
  return #fields
end

-- Checks some schedules, continuing where the last call ended: more of them if it found damage.
local function check_schedules()
  local cursor, count = string.match(call('HGET', META, 'schedule_check') or '', '^(%d+):(%d+)$')
  count = count or '20'
  local page, damaged = call('HSCAN', SCHEDULES, cursor or '0', 'COUNT', count), false
  local fields = {}
  for i = 1, #page[2], 2 do fields[#fields + 1] = page[2][i] end
  local scanned, done = #fields, 0
  for _, some in ipairs({call('HRANDFIELD', SPECS, count), call('ZRANDMEMBER', DUE, count), call('ZRANDMEMBER', NAMES, count)}) do
    for i = 1, #some do fields[#fields + 1] = some[i] end
  end
  while done < #fields and bytes < BYTES do
    done = done + 1
    damaged = mend_schedule(fields[done]) or damaged
  end
  local next = (done >= scanned and page[1] or cursor or '0') .. ':' .. (damaged and '500' or page[1] == '0' and '20' or count)
  if next ~= '0:20' then
    call('HSET', META, 'schedule_check', next)
  elseif cursor then
    call('HDEL', META, 'schedule_check')
  end
end

-- One queue: its names, and the numbers that nearly every script reads and changes, packed in one string that
-- `save_all` writes. Counters that change less often are in the hash, see `add`.
local NUMBERS, SIZE = '<dddddddddddddddd', 128
local QUEUE_TTL = 86400000000 -- microseconds; the default of the setting
local queues = {}
local at_end = {} -- functions to call at the end of the script
local changed_parents = {} -- tasks that ended in this script and for which others wait, see `after.lua`
local inform_children -- a function of `after.lua`
local replicas = 0 -- number of replicas that must have the writes before the call is confirmed

local checked = true -- false in `repair`, which the client calls after such an error

-- Returns whether numbers are finite and were not cut, and the lanes are priorities, the highest first. Numbers of
-- earlier versions do not have the number of lanes.
local function is_sound(packed, waiting, kind)
  return waiting == waiting and kind == kind and (kind < 16 or #packed == SIZE + floor(kind / 16))
    and string.find(packed, '^9?8?7?6?5?4?3?2?1?0?$', SIZE + 1) ~= nil
end

local function queue(key)
  local q = queues[key]
  if q then return q end
  local name = PARTITION .. ':q:' .. key
  local packed = call('GET', name .. '/n')
  if packed then
    local waiting, back, in_flight, published, delivered, done, last, due, window, extras, journal, confirming, fresh,
      kind, laned, held = unpack_struct(NUMBERS, packed)
    if checked and not is_sound(packed, waiting, kind) then error('the numbers of a queue are damaged') end
    q = {
      key = key, name = name, known = packed, before = waiting - held, flying = in_flight, unclaimed = fresh, ring = false, looked = 0,
      lanes = sub(packed, SIZE + 1),
      waiting = waiting, back = back, in_flight = in_flight, published = published, delivered = delivered, done = done,
      last = last, -- the highest sequence number so far; it is close to the time in microseconds
      due = due, -- when the next scheduled task becomes available
      window = window, extras = extras % 2 == 1, keeps = extras >= 2, journal = journal == 1, replicas = confirming,
      fresh = fresh, -- number of tasks that were never delivered
      limited = kind % 2 == 1, -- see `flow.lua`
      sorted = kind % 4 >= 2, -- see `lanes.lua`
      laned = laned, held = held, -- number of waiting entries in sorted lanes, and number that wait for an ordering key
      timed = kind % 8 >= 4, -- see `timing.lua`
      bound = kind % 16 >= 8, -- tasks that are published here are copied to other queues
    }
    if confirming > replicas then replicas = confirming end
  else
    if checked and call('EXISTS', name .. '/t') == 1 then error('the numbers of a queue are missing') end
    q = {
      key = key, name = name, known = false, before = 0, flying = 0, unclaimed = 0, ring = false, looked = 0, lanes = '',
      waiting = 0, back = 0, in_flight = 0, published = 0, delivered = 0, done = 0,
      last = 0, due = math.huge, window = 300000000, extras = false, keeps = false, journal = false, replicas = 0,
      fresh = 0, limited = false, sorted = false, laned = 0, held = 0, timed = false, bound = false,
    }
  end
  queues[key] = q
  return q
end

local function next_seq(q)
  local last = q.last + 1
  if last < now then last = now end
  q.last = last
  return last
end

local function stream_of(q, kind, priority) return q.name .. '/' .. kind .. priority end

-- Stores the numbers of queues and sends notifications. Must be called at the end of every script that may have changed
-- such numbers. Notifications are sent with pcall: a missing right to a channel must not end a script in the middle.
local function save_all()
  if changed_parents[1] then inform_children() end
  local ending = 1
  while ending <= #at_end do -- functions may add others
    at_end[ending]()
    ending = ending + 1
  end
  at_end = {}
  for key, q in pairs(queues) do
    if q.save then q.save(q) end
    if q.large then call('HSET', q.name, 'large', 1) end -- few entries are read at once from now on
    local waiting, before = q.waiting - q.held, q.before
    local kind = (q.limited and 1 or 0) + (q.sorted and 2 or 0) + (q.timed and 4 or 0) + (q.bound and 8 or 0)
      + 16 * #q.lanes
    local packed = pack(NUMBERS, q.waiting, q.back, q.in_flight, q.published, q.delivered, q.done, q.last, q.due, q.window,
      (q.extras and 1 or 0) + (q.keeps and 2 or 0), q.journal and 1 or 0, q.replicas, q.fresh, kind, q.laned, q.held) .. q.lanes
    if packed ~= q.known then
      if not q.known then
        call('SADD', PARTITION .. ':queues', key)
        call('ZADD', PARTITION .. ':idle', 'NX', text(now + QUEUE_TTL), key)
      end
      call('SET', q.name .. '/n', packed)
      q.known = packed
    end
    if before == 0 and waiting > 0 then
      call('SADD', PARTITION .. ':ready', key)
      if q.ring then redis.pcall('PUBLISH', PARTITION .. ':bell:' .. key, '') end
    elseif before > 0 and waiting == 0 then
      call('SREM', PARTITION .. ':ready', key)
    end
    if q.opened or (q.limited and q.in_flight < q.flying) then
      if waiting > 0 then redis.pcall('PUBLISH', PARTITION .. ':bell:' .. key, '') end
    end
    if q.changed or (q.limited and q.fresh < q.unclaimed) then redis.pcall('PUBLISH', PARTITION .. ':room:' .. key, '') end
    q.before, q.flying, q.unclaimed, q.ring, q.opened = waiting, q.in_flight, q.fresh, false, false
  end
  -- Write something in any case if replicas must confirm, because WAIT waits for the last write of its connection.
  if replicas > 0 then call('HINCRBY', META, 'marks', 1) end
end

-- Reading and writing records.

local function read_record(packed)
  local r = {}
  r.state, r.place, r.priority, r.attempt, r.losses, r.prior, r.handed, r.seq, r.fence, r.at,
    r.digest, r.verb, r.answer, r.settled = unpack_struct(RECORD, packed)
  return r
end

local function write_record(r)
  return pack(RECORD, r.state, r.place, r.priority, r.attempt, r.losses, r.prior, r.handed, r.seq, r.fence,
    r.at, r.digest, r.verb, r.answer, r.settled)
end

local function new_record(priority, digest)
  return {state = WAITING, place = NOWHERE, priority = priority, attempt = 1, losses = 0, prior = 0, handed = 0,
    seq = 0, fence = 0, at = now, digest = digest, verb = 0, answer = 0, settled = 0}
end

local function is_live(r) return r.state <= SCHEDULED end
local function is_over(r) return r.state ~= DEAD and r.state > SCHEDULED end

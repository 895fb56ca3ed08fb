--@ base room slots
-- Releases some leases, and acquires free slots of a model.
-- ARGV: model, holder, duration of the leases, maximum number of slots, time after which unassigned leases of other
-- holders are taken over ("": never), a random seed, "1" if the call is repeated because its answer was lost, tokens to
-- release. Durations are in microseconds.
-- Returns the epoch, the expiry time, and per lease its endpoint's id, fence, secret, server, URL, and 1 if its server
-- had another model before.
local model, holder, ttl, most, idle, seed = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]
lift_refusal()
demand_pool()
sweep(SWEPT)
for i = 10, #ARGV do
  local p, l = current(ARGV[i])
  if l then finish(p, l, false) end
end

local answer, taken, open = {EPOCH, text(now + ttl)}, 0, {}

local function add(p, l)
  p.url = p.url or call('HGET', p.name, 'u')
  taken = taken + 1
  local at = #answer
  answer[at + 1], answer[at + 2], answer[at + 3] = p.id, l.fence, l.secret
  answer[at + 4], answer[at + 5], answer[at + 6] = p.server, p.url, yes(l.switched)
end

local ids = ids_of(model)
for i = 1, #ids do
  local p = place(ids[i])
  if p and may_give(p) then open[#open + 1] = p end
  if p and ARGV[9] == '1' and p.unassigned > 0 then
    local fences = call('ZRANGE', p.name .. ':u', 0, -1)
    for j = 1, #fences do
      local l = lease_at(p, fences[j])
      if l and l.secret == secret_of(seed, l.fence) then
        answer[2] = text(l.expires)
        add(p, l)
      end
    end
  end
end
if taken > 0 then most = taken end -- the number of slots in the answer that was lost

-- Classes of endpoints that are equally good: by priority, and by whether their server ran this model last. Within a
-- class, the endpoints with the fewest leases come first, then those that were registered earlier.
local classes, ranks = {}, {}
for i = 1, #open do
  local p = open[i]
  local rank = 2 * p.priority + yes(server_of(p.server).last == model)
  if not classes[rank] then classes[rank], ranks[#ranks + 1] = {}, rank end
  classes[rank][#classes[rank] + 1] = p
end
table.sort(ranks, function(a, b) return a > b end)
for i = 1, #ranks do
  local class = classes[ranks[i]]
  while taken < most and #class > 0 do
    local fewest, left = math.huge, {}
    for j = 1, #class do fewest = math.min(fewest, held(class[j])) end
    for j = 1, #class do
      local p, full = class[j], false
      if taken < most and held(p) == fewest then
        full = fewest >= p.slots or room_of(server_of(p.server)) <= 0
        if not full then add(p, give(p, server_of(p.server), holder, ttl, seed)) end
      end
      if not full then left[#left + 1] = p end
    end
    class = left
  end
end

if taken < most and idle then
  local found = {}
  for i = 1, #open do
    local p, at, of_others = open[i], 0, 0
    local may_replace = held(p) <= p.slots and room_of(server_of(p.server)) >= 0
    while may_replace and at < p.unassigned and of_others < most - taken do
      local fences = call('ZRANGEBYSCORE', p.name .. ':u', '-inf', '(' .. text(now - idle), 'LIMIT', at, 100)
      for j = 1, #fences do
        local l = lease_at(p, fences[j])
        if l and l.holder ~= holder then
          of_others = of_others + 1
          found[#found + 1] = {tonumber(l.fence), p, l}
        end
      end
      at = #fences == 100 and at + 100 or p.unassigned
    end
  end
  table.sort(found, function(a, b) return a[1] < b[1] end)
  for i = 1, math.min(#found, most - taken) do
    local p = found[i][2]
    finish(p, found[i][3], false)
    add(p, give(p, server_of(p.server), holder, ttl, seed))
  end
end
save_places()
return answer

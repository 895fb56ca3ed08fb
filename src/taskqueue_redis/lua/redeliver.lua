--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events ends after returns receipts
-- Takes deliveries back. If a consumer has lost them, takes back only those that it owns, and counts them as lost.
-- ARGV: token of the consumer that lost them ("" to release them), then per delivery: key, id, sequence number of the
-- entry, token.
-- Returns "ok", "dead" or "lost" per delivery; only for the first ones if their tasks are large.
local loser = ARGV[3]
local verb = loser ~= '' and LOST or REDELIVER
local answers = {}
lift_refusal()
for at = 4, #ARGV, 4 do
  if bytes >= BYTES then break end
  local q, id, fence, token = queue(ARGV[at]), ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local r, name, owner, idle = delivery_of(q, id, fence, token)
  local answer = 'lost'
  if r then
    if not name then
      answer = settled_before(r, fence, verb)
    elseif verb == REDELIVER or owner == loser then
      call('HDEL', q.name .. '/a', fence)
      local worker = verb == LOST and worker_of(q, owner, true) or worker_of(q, owner)
      local body = body_at(name, fence)
      bytes = bytes + #body
      local dead = hand_back(q, id, r, name, fence, body, verb == LOST, verb, worker, idle)
      answer = dead and 'dead' or 'ok'
    end
  end
  answers[#answers + 1] = answer
end
save_all()
return answers

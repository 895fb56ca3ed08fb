--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events ends after
-- Notes children at their parents. ARGV: per child: parent, child, entry of the child, "1" if it wants the result.
-- Returns per child {state of the parent (0 if it is not known, 10 if it is in flight, 11 if the child must be registered
-- again), result ("" for none), version}; only for the first ones if the results are large.
lift_refusal()
local answers, version = {}, next_number()
for at = 3, #ARGV, 4 do
  if bytes >= BYTES then break end
  local parent, child, entry, wanted = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3] == '1'
  local kind = wanted and 'fi' or 'f'
  local r, result, later = waiting().look_at(parent, child, entry, kind)
  local answer = {UNKNOWN_PARENT, '', version}
  if r then
    local key = string.match(parent, '^[^/]*')
    local state = r.state
    if r.state == WAITING and r.place ~= HELD and r.place ~= PARKED and holder(stream_with(queue(key), r), text(r.fence)) then
      state = 10
    end
    answer = {state, result or '', version}
  else -- perhaps its end is in a line, or will be
    local sound, said = pcall(cmsgpack.unpack, call('HGET', LINES, 'end ' .. parent .. ' ' .. child) or '')
    if not (sound and type(said) == 'table' and said.e == entry) then
      said = call('ZSCORE', KIN, parent .. ' ' .. child .. ' ' .. entry .. ' ' .. kind) and kept_end(parent)
    end
    if said then
      answer = {said.s, wanted and said.r or '', said.v}
    elseif later then -- it is not noted yet
      answer[1] = 11
    end
  end
  bytes = bytes + #answer[2]
  answers[#answers + 1] = answer
end
save_all()
return answers

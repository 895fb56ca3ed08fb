--@ base slots
-- Releases slots. ARGV: tokens. Returns 1 per token, or 0 if the token is stale.
local answers = {}
sweep(SWEPT)
for i = 3, #ARGV do
  local p, l = current(ARGV[i])
  if l then finish(p, l, false) end
  answers[#answers + 1] = yes(l)
end
save_places()
return answers

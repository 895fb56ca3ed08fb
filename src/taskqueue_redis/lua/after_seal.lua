--@ base room queue states record kin
-- Closes batches in this partition. ARGV: batches. Returns per batch {name of the partition, version, whether it is closed,
-- and its counts}.
local answers = {}
lift_refusal()
for i = 3, #ARGV do
  local c = count_of(ARGV[i])
  if not c.c then
    c.c = true
    save_count(ARGV[i])
  end
  answers[#answers + 1] = {ARGV[1], c.v, 1, c.a, c.d, c.f, c.x}
end
save_all()
return answers

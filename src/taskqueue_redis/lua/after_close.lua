--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events ends after
-- Writes the line that closes a batch. ARGV: batch. Returns 1, or 0 if there is no such batch that is blocked.
lift_refusal()
local _, _, _, s = waiting().blocked_at(ARGV[3])
if s and s.b and not s.o then add_line('close', ARGV[3], '-', {}) end
save_all()
return s and s.b and 1 or 0

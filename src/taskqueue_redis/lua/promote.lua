--@ base room queue states record counts streams flow tenants lanes cold kin damage journal places events ends after promote
-- Makes due tasks available. ARGV: maximum number. Returns how many became available, and when the
-- next task is due ("" for none).
lift_refusal()
local promoted = promote_due(tonumber(ARGV[3]))
save_all()
local due = call('ZRANGE', PARTITION .. ':due', 0, 0, 'WITHSCORES')
return {promoted, due[2] or ''}

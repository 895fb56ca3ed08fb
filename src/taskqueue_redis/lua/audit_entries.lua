--@ base
-- Returns entries of the audit log, newest first. ARGV: id before which the page begins ("+" for the first page), maximum
-- number. Returns the id of each entry, and its fields.
return call('XREVRANGE', PARTITION .. ':audit', ARGV[3] == '+' and '+' or '(' .. ARGV[3], '-', 'COUNT', ARGV[4])

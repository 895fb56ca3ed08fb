--@ base
-- Adds an entry to the audit log. ARGV: number of entries to keep, entry as JSON.
call('XADD', PARTITION .. ':audit', 'MAXLEN', '~', ARGV[3], '*', 'at', text(now), 'entry', ARGV[4])

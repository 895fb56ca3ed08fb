--@ base slots
-- Lists the documents in pages. ARGV: cursor. Returns the next cursor, "0" at the end, followed by alternately a model
-- and its document.
local page = call('HSCAN', POOL .. ':documents', ARGV[3], 'COUNT', 50)
table.insert(page[2], 1, page[1])
return page[2]

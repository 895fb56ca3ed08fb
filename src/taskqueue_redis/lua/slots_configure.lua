--@ base slots
-- Stores a document for a model. ARGV: model, document ("" deletes it).
if ARGV[4] == '' then
  call('HDEL', POOL .. ':documents', ARGV[3])
else
  call('HSET', POOL .. ':documents', ARGV[3], ARGV[4])
end
return 'ok'

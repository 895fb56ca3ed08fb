--@ base slots
-- Answers the documents, each behind its model.
return call('HGETALL', POOL .. ':documents')

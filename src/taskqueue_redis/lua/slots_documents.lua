--@ base slots
-- Returns the models and their documents, in turn.
return call('HGETALL', POOL .. ':documents')

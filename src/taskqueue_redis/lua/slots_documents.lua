--@ base slots
-- Returns alternately a model and its document.
return call('HGETALL', POOL .. ':documents')

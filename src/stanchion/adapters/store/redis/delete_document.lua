-- delete_document: remove a document.
-- KEYS   documents document_names
-- ARGV   1 name
-- ANSWER 1; 0 if there was none
redis.call('ZREM', key.document_names, ARGV[1])
return redis.call('HDEL', key.documents, ARGV[1])

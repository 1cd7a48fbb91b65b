-- put_document: write a document, if its revision is still the one that was read.
-- KEYS   documents document_names audit_log audit_log_of
-- ARGV   1 name  2 value as JSON  3 the revision that was read: 0 for none, '' for any
--        4 audit entry (see part audit), or ''
-- ANSWER the new revision; nil if the revision has changed
-- USES   time audit
local packed = redis.call('HGET', key.documents, ARGV[1])
local revision = packed and cmsgpack.unpack(packed)[1] or 0
if ARGV[3] ~= '' and tonumber(ARGV[3]) ~= revision then
  return nil
end
redis.call('HSET', key.documents, ARGV[1], cmsgpack.pack({revision + 1, ARGV[2]}))
redis.call('ZADD', key.document_names, 0, ARGV[1])
if ARGV[4] ~= '' then
  write_audit(cmsgpack.unpack(ARGV[4]))
end
return revision + 1

-- delete_document: remove a document.
-- KEYS   documents document_names audit_log audit_log_of
-- ARGV   1 name  2 audit entry (see part audit), or ''
-- ANSWER 1; 0 if there was none
-- USES   time audit
redis.call('ZREM', key.document_names, ARGV[1])
local removed = redis.call('HDEL', key.documents, ARGV[1])
if ARGV[2] ~= '' and removed == 1 then
  write_audit(cmsgpack.unpack(ARGV[2]))
end
return removed

-- Write the whole content of a response: at its beginning, and again if Redis has lost it.
--
-- KEYS content, journal
-- ARGV term, ttl_ms, head, gateway: that follows its jobs  handles: of its jobs; then the journal
--   entries
-- Returns 1 if written, 0 if a later term has begun (nothing is changed)
-- @include server
local content, journal = unpack(KEYS, 1, 2)
local term, ttl_ms, head, gateway, handles = unpack(ARGV, 1, 5)
local first_entry, known_term = 6, call('HGET', content, 'term')
if known_term and tonumber(known_term) > tonumber(term) then return 0 end
call('DEL', content, journal)
call('HSET', content, 'term', term, 'head', head, 'gateway', gateway, 'handles', handles)
call('PEXPIRE', content, ttl_ms)
for i = first_entry, #ARGV do call('RPUSH', journal, ARGV[i]) end
call('PEXPIRE', journal, ttl_ms)
return 1

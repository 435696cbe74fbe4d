-- Raise the term of a response's content: writes of earlier terms are rejected from now on.
--
-- The handles of the former owner stay until the new one has written: the journal may lack replies to
-- them, and the new owner may die before it has any.
--
-- KEYS content, journal
-- ARGV term, ttl_ms, head: of a paused response that resumes; else empty, to keep it
-- Returns 1, or 0 if the content is gone or of a later term (no effect)
-- @include server
local content, journal = unpack(KEYS, 1, 2)
local term, ttl_ms, head = unpack(ARGV, 1, 3)
local known_term = call('HGET', content, 'term')
if not known_term or tonumber(known_term) > tonumber(term) then return 0 end
-- First, so that a response can resume while the memory of Redis is full.
call('HDEL', content, '')
call('HSET', content, 'term', term)
if head ~= '' then call('HSET', content, 'head', head) end
call('PEXPIRE', content, ttl_ms)
call('PEXPIRE', journal, ttl_ms)
return 1

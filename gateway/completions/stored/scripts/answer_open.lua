-- Write a whole response: at its beginning, and again if Redis has lost it.
--
-- KEYS response, journal
-- ARGV term, ttl_ms, head, owner, background: 0 or 1  handles, reservation, state, settled; then the
--   journal entries
-- Returns 1 if written, 0 if another gateway owns it, or a client has deleted it (nothing is changed)
-- @include server
local response, journal = unpack(KEYS, 1, 2)
local term, ttl_ms, head, owner, background, handles, reservation, state, settled = unpack(
  ARGV, 1, 9)
local first_entry, known_term, deleted = 10, unpack(call('HMGET', response, 'term', 'deleted'))
if deleted or known_term and tonumber(known_term) > tonumber(term) then return 0 end
call('DEL', response, journal)
call('HSET', response, 'term', term, 'head', head, 'owner', owner, 'background', background,
  'handles', handles, 'reservation', reservation, 'state', state, 'settled', settled)
call('PEXPIRE', response, ttl_ms)
for i = first_entry, #ARGV do call('RPUSH', journal, ARGV[i]) end
call('PEXPIRE', journal, ttl_ms)
return 1

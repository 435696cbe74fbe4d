-- Begin a new term of a response, with another gateway as its owner.
--
-- The former owner's handles stay in `unread_owner` and `unread_handles` until the new owner has
-- written: its journal may lack replies to them, and the new owner may die before it has any.
--
-- KEYS response, journal
-- ARGV term, state: those that end  ttl_ms  owner, no_handles, new_state, head: of the new term; an
--   empty head does not change it
-- Returns the new term, or 0 if the response is gone or has changed its term or state (no effect)
-- @include server
local response, journal = unpack(KEYS, 1, 2)
local term, state, ttl_ms, owner, no_handles, new_state, head = unpack(ARGV, 1, 7)
local known_term, known_state, known_owner, handles = unpack(
  call('HMGET', response, 'term', 'state', 'owner', 'handles'))
if known_term ~= term or known_state ~= state then return 0 end
if state ~= new_state then
  call('HDEL', response, 'unread_owner', 'unread_handles')
elseif handles ~= no_handles then
  call('HSET', response, 'unread_owner', known_owner, 'unread_handles', handles)
end
local new_term = call('HINCRBY', response, 'term', 1)
call('HSET', response, 'owner', owner, 'handles', no_handles, 'state', new_state)
if head ~= '' then call('HSET', response, 'head', head) end
call('PEXPIRE', response, ttl_ms)
call('PEXPIRE', journal, ttl_ms)
return new_term

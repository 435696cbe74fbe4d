-- Append to a response's journal and update its status. Skips entries appended by an earlier call.
--
-- KEYS response, journal
-- ARGV term, ttl_ms, index: number of entries before the given ones
--   handles, reservation, state, settled: the status; then the journal entries
-- Returns 1 if done, 0 if another gateway owns it, -1 if Redis lost some or all of it (no effect)
-- @include server
local response, journal = unpack(KEYS, 1, 2)
local term, ttl_ms, index, handles, reservation, state, settled = unpack(ARGV, 1, 7)
local first_entry, known_term = 8, call('HGET', response, 'term')
if not known_term or tonumber(known_term) < tonumber(term) then return -1 end
if known_term ~= term then return 0 end
local known = call('LLEN', journal) - index
if known < 0 then return -1 end
-- First, so that a response can end while the memory of Redis is full.
call('HDEL', response, 'unread_owner', 'unread_handles')
for i = first_entry + known, #ARGV do call('RPUSH', journal, ARGV[i]) end
call('HSET', response, 'handles', handles, 'reservation', reservation, 'state', state,
  'settled', settled)
call('PEXPIRE', response, ttl_ms)
call('PEXPIRE', journal, ttl_ms)
return 1

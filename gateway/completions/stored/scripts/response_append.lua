-- Append to a response's journal. Skips entries appended by an earlier call.
--
-- KEYS content, journal
-- ARGV term, ttl_ms, index: number of entries before the given ones
--   gateway: that follows its jobs  handles: of its jobs; then the journal entries
-- Returns 1 if done, 0 if a later term has begun, -1 if Redis lost some or all of it (no effect)
-- @include server
local content, journal = unpack(KEYS, 1, 2)
local term, ttl_ms, index, gateway, handles = unpack(ARGV, 1, 5)
local first_entry, known_term = 6, call('HGET', content, 'term')
if not known_term or tonumber(known_term) < tonumber(term) then return -1 end
if known_term ~= term then return 0 end
local known = call('LLEN', journal) - index
if known < 0 then return -1 end
-- First, so that a response can end while the memory of Redis is full.
call('HDEL', content, '')
for i = first_entry + known, #ARGV do call('RPUSH', journal, ARGV[i]) end
call('HSET', content, 'gateway', gateway, 'handles', handles)
call('PEXPIRE', content, ttl_ms)
call('PEXPIRE', journal, ttl_ms)
return 1

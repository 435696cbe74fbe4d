-- Delete what remains of an ended request, because its response is deleted.
--
-- A mark stays for as long as the record would have, if it has an Idempotency-Key: a request with this
-- key does not run again. Without one it stays for a moment: the owner does not write the response again.
--
-- KEYS record
-- ARGV most_ms: for which the mark stays at most; or empty
-- Output the milliseconds for which the mark of a key stays; 0 without one
-- @include states
local record = unpack(KEYS, 1, 1)
local most_ms = unpack(ARGV, 1, 1)
local created_ms, state, index = unpack(call('HMGET', record, 'created_ms', 'state', 'key'))
if not may('forget', state_of(created_ms, state)) then return 0 end
local longest_ms = tonumber(most_ms) or index and math.huge or 60000
local stays_ms = math.min(call('PTTL', record), longest_ms)
-- First, so that it works while the memory of Redis is full.
call('HDEL', record, '')
call('HSET', record, 'state', DELETED)
call('PEXPIRE', record, stays_ms)
if not index then return 0 end
call('PEXPIRE', index, stays_ms)
return stays_ms

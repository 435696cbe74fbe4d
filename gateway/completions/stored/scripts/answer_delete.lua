-- Delete a response. If an Idempotency-Key maps to it, a mark remains as long as the response would
-- have, so that a repeated request does not run again.
--
-- KEYS response, journal
-- ARGV has_key: 1 to leave the mark, else 0
-- Returns the milliseconds for which the mark remains, 0 without one
-- @include server
local response, journal = unpack(KEYS, 1, 2)
local has_key = unpack(ARGV, 1, 1)
local left = call('PTTL', response)
call('DEL', response, journal)
if has_key ~= '1' or left <= 0 then return 0 end
call('HSET', response, 'deleted', 1)
call('PEXPIRE', response, left)
return left

-- Show a running request as ended, while its jobs stop and it is not settled yet.
--
-- Nobody takes it over then: its owner settles it, or the sweep.
--
-- KEYS record
-- ARGV term, ends_as: the state that it has once it is settled
-- Output 1, or 0 if the request is not running, or of another term
-- @include states
local record = unpack(KEYS, 1, 1)
local term, ends_as = unpack(ARGV, 1, 2)
local created_ms, state, known_term = unpack(call('HMGET', record, 'created_ms', 'state', 'term'))
if not may('stop', state_of(created_ms, state), known_term, term) then return 0 end
-- First, so that it works while the memory of Redis is full.
call('HDEL', record, '')
-- The first one stays: a client may have deleted the response since.
call('HSETNX', record, 'ends_as', ends_as)
return 1

-- Count the bytes that Redis stores for a request: for its tenant, and for its key and project
-- where they are limited.
--
-- They count until they expire, or until the request ends or is deleted. What is stored for no
-- request in particular has a record of its own, with nothing else in it.
--
-- KEYS record
-- ARGV ends_prefix, bytes_prefix  names: msgpack: those of the subjects
--   bytes: from now on; or empty to change nothing  live_ms: milliseconds after which they expire
--   then the limit of each subject, or nothing
-- Output {0, bytes of each subject...} if they count, or if the request has ended;
--   {subject, its bytes} if this subject rejects, and nothing is changed
-- @include stored
local record = unpack(KEYS, 1, 1)
local ends_prefix, bytes_prefix, names, bytes, live_ms = unpack(ARGV, 1, 5)
local first_limit = 6
bytes, names = tonumber(bytes), cmsgpack.unpack(names)

local created_ms, state = unpack(call('HMGET', record, 'created_ms', 'state'))
state = state_of(created_ms, state)
if not may('keep', state) then bytes = nil end
local limits = ARGV[first_limit] and {unpack(ARGV, first_limit)}
local refusing, sums = count_bytes(record, ends_prefix, bytes_prefix, names, bytes,
  tonumber(live_ms), limits)
if refusing > 0 then return {refusing, sums[refusing]} end
if bytes and bytes > 0 and state == ABSENT then call('PEXPIRE', record, live_ms) end
return {0, unpack(sums)}

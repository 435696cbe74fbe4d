-- Delete what remains of an ended request, because its response is deleted.
--
-- One that is shown as ended, and not settled yet, is deleted by its settlement. A mark stays for as
-- long as the record would have, if it has an Idempotency-Key: a request with this key does not run
-- again. Without one it stays for a moment: the owner does not write the response again.
--
-- KEYS record
-- ARGV most_ms: for which the mark stays at most; or empty  ends_prefix, bytes_prefix
-- @include stored
local record = unpack(KEYS, 1, 1)
local most_ms, ends_prefix, bytes_prefix = unpack(ARGV, 1, 3)
local created_ms, state, ends_as, index, counted = unpack(
  call('HMGET', record, 'created_ms', 'state', 'ends_as', 'key', 'counted'))
if not may('forget', state_of(created_ms, ends_as or state)) then return end
-- First, so that it works while the memory of Redis is full.
call('HDEL', record, '')
if ends_as then
  call('HSET', record, 'ends_as', DELETED)
  return
end
local stays_ms = math.min(call('PTTL', record), tonumber(most_ms) or index and math.huge or 60000)
if counted then
  count_bytes(record, ends_prefix, bytes_prefix, cmsgpack.unpack(counted), index and MARK_BYTES or 0,
    stays_ms)
end
call('HSET', record, 'state', DELETED)
call('PEXPIRE', record, stays_ms)
if index then call('PEXPIRE', index, stays_ms) end

-- Find open requests whose lease has expired.
--
-- They stay unchanged until they are settled.
--
-- KEYS open_requests
-- ARGV most: maximum number of reservations  skip: how many to skip, longest expired first
-- Output {request id, creation in Unix milliseconds, draft of the usage record, expiry of the lease
--   in Unix milliseconds, ...}, longest expired first
-- @include server
local open_requests = unpack(KEYS, 1, 1)
local record_prefix, most, skip = unpack(ARGV, 1, 3)
local out, found = {}, call('ZRANGEBYSCORE', open_requests, '-inf', now_ms(), 'WITHSCORES',
  'LIMIT', skip, most)
for i = 1, #found, 2 do
  local id, expiry = found[i], found[i + 1]
  local created_ms, record = unpack(
    call('HMGET', record_prefix .. id, 'created_ms', 'record'))
  if created_ms then
    for _, value in ipairs({id, created_ms, record, expiry}) do out[#out + 1] = value end
  else
    call('ZREM', open_requests, id)
  end
end
return out

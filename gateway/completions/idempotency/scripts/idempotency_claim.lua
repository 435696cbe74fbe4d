-- Map an Idempotency-Key to a request, unless it maps to another one.
--
-- KEYS entry: idempotency entry of the key
-- ARGV request_id, body_digest: of the request  retention_ms: TTL of the entry
--   in_place_of: id of a request that this one may replace; empty if none  gateway: of the request
-- Returns {id of the request to which the key maps now, digest of its body, age in milliseconds,
--   its gateway; empty if an earlier release stored the entry}
-- @include server
local entry = unpack(KEYS, 1, 1)
local request_id, body_digest, retention_ms, in_place_of, gateway = unpack(ARGV, 1, 5)
local now = now_ms()
local seen, seen_body, created_ms, seen_gateway = unpack(
  call('HMGET', entry, 'request', 'body', 'created_ms', 'gateway'))
if seen and seen ~= in_place_of then
  return {seen, seen_body, now - tonumber(created_ms), seen_gateway or ''}
end
call('HSET', entry, 'request', request_id, 'body', body_digest,
  'created_ms', string.format('%d', now), 'gateway', gateway)
call('PEXPIRE', entry, retention_ms)
return {request_id, body_digest, 0, gateway}

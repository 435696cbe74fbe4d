-- Map an Idempotency-Key to a request, unless it maps to another one.
--
-- KEYS[1] idempotency entry of the key
-- ARGV[1] request id  ARGV[2] digest of the request's body  ARGV[3] TTL of the entry in milliseconds
-- ARGV[4] id of a request that this one may replace; empty if none  ARGV[5] gateway of the request
-- Returns {id of the request to which the key maps now, digest of its body, age in milliseconds,
--   its gateway; empty if an earlier release stored the entry}
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local seen = redis.call('HMGET', KEYS[1], 'request', 'body', 'created_ms', 'gateway')
if seen[1] and seen[1] ~= ARGV[4] then
  return {seen[1], seen[2], now_ms - tonumber(seen[3]), seen[4] or ''}
end
redis.call('HSET', KEYS[1], 'request', ARGV[1], 'body', ARGV[2],
  'created_ms', string.format('%d', now_ms), 'gateway', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {ARGV[1], ARGV[2], 0, ARGV[5]}

-- Free an Idempotency-Key whose request was not admitted, so that a client can retry it. Or let it
-- stay taken for a while, although its response is deleted.
--
-- KEYS[1] idempotency entry of the key
-- ARGV[1] request id  ARGV[2] milliseconds for which the key stays taken; 0 frees it at once
-- Returns 1 if the key mapped to this request, else 0
if redis.call('HGET', KEYS[1], 'request') ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then return redis.call('DEL', KEYS[1]) end
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
-- Without a gateway, nobody can find that its gateway is dead.
redis.call('HDEL', KEYS[1], 'gateway')
redis.call('HSET', KEYS[1], 'created_ms', string.format('%d', now_ms))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1

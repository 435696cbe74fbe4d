-- Free an Idempotency-Key whose request was not admitted, so that a client can retry it.
--
-- KEYS[1] idempotency entry of the key
-- ARGV[1] request id
-- Returns 1 if the key mapped to this request, else 0
if redis.call('HGET', KEYS[1], 'request') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])

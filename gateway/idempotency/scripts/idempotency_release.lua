-- Free an Idempotency-Key whose request was not admitted, so that it can be tried again.
--
-- KEYS[1] idempotency entry of the key
-- ARGV[1] request id
-- Output 1 if the key stood for this request, else 0
if redis.call('HGET', KEYS[1], 'request') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])

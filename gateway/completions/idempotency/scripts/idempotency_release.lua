-- Free an Idempotency-Key whose request was not admitted, so that a client can retry it. Or let it
-- stay taken for a while, although its response is deleted.
--
-- KEYS entry: idempotency entry of the key
-- ARGV request_id, retired_ms: milliseconds for which the key stays taken; 0 frees it at once
-- Returns 1 if the key mapped to this request, else 0
-- @include server
local entry = unpack(KEYS, 1, 1)
local request_id, retired_ms = unpack(ARGV, 1, 2)
if call('HGET', entry, 'request') ~= request_id then return 0 end
if retired_ms == '0' then return call('DEL', entry) end
-- Without a gateway, nobody can find that its gateway is dead.
call('HDEL', entry, 'gateway')
call('HSET', entry, 'created_ms', string.format('%d', now_ms()))
call('PEXPIRE', entry, retired_ms)
return 1

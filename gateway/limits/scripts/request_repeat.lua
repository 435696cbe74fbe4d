-- Count a request among the equal ones of a key in a window, or take it back.
--
-- The requests that are repeated least leave the set when it is full, so that each key takes a
-- bounded part of the memory.
--
-- KEYS repeats: the set of the key and the window
-- ARGV digest: of the request  by: 1 or -1  ends_ms: Unix time at which the window ends
-- Output how often the request was sent
-- @include server
local repeats = unpack(KEYS, 1, 1)
local digest, by, ends_ms = unpack(ARGV, 1, 3)
local MOST = 256
local count = call('ZINCRBY', repeats, by, digest)
call('PEXPIREAT', repeats, ends_ms)
if call('ZCARD', repeats) > MOST then call('ZREMRANGEBYRANK', repeats, 0, MOST / 2 - 1) end
return tonumber(count)

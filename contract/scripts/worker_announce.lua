-- Announce a live worker, and whether it claims jobs. What it holds for jobs lives as long.
--
-- KEYS workers, its card, what it holds
-- ARGV ttl_ms: milliseconds until it expires  is_claiming: 1 if it claims jobs, else 0
-- Output how many digests of what it holds are known
-- @include server
local workers, card_key, held = unpack(KEYS, 1, 3)
local worker, card, ttl_ms, is_claiming = unpack(ARGV, 1, 4)
call('SET', card_key, card, 'PX', ttl_ms)
if is_claiming == '1' then
  call('ZADD', workers, now_ms() + ttl_ms, worker)
  call('PEXPIRE', held, ttl_ms)
else
  call('ZREM', workers, worker)
  call('DEL', held)
end
return call('SCARD', held)

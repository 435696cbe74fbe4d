-- Announce a live worker, and whether it claims jobs. What it holds for jobs lives as long. If it
-- stops claiming, another worker looks after the jobs that are kept for it.
--
-- KEYS workers, its card, what it holds, doorbell of requests
-- ARGV ttl_ms: milliseconds until it expires  is_claiming: 1 if it claims jobs, else 0
-- Output how many digests of what it holds are known
-- @include doorbell
local workers, card_key, held, doorbell = unpack(KEYS, 1, 4)
local worker, card, ttl_ms, is_claiming = unpack(ARGV, 1, 4)
call('SET', card_key, card, 'PX', ttl_ms)
if is_claiming == '1' then
  call('ZADD', workers, now_ms() + ttl_ms, worker)
  call('PEXPIRE', held, ttl_ms)
else
  call('DEL', held)
  if call('ZREM', workers, worker) == 1 then ring(doorbell) end
end
return call('SCARD', held)

-- Announce a live worker, and whether it claims jobs. What it holds for jobs lives as long. If it
-- stops claiming, another worker looks after the jobs that are kept for it.
--
-- KEYS workers, its card, what it holds, doorbell of requests, workers that were last seen
-- ARGV ttl_ms: milliseconds until it expires  is_claiming: 1 if it claims jobs, else 0
--   listed_ms: how long a worker that is silent is known
-- Output how many digests of what it holds are known
-- @include doorbell
local workers, card_key, held, doorbell, last_seen = unpack(KEYS, 1, 5)
local worker, card, ttl_ms, is_claiming, listed_ms = unpack(ARGV, 1, 5)
local now = now_ms()
call('SET', card_key, card, 'PX', ttl_ms)
call('HSET', last_seen, worker, string.format('%d ', now) .. card)
call('PEXPIRE', last_seen, listed_ms)
if is_claiming == '1' then
  call('ZADD', workers, now + ttl_ms, worker)
  call('PEXPIRE', held, ttl_ms)
else
  call('DEL', held)
  if call('ZREM', workers, worker) == 1 then ring(doorbell) end
end
return call('SCARD', held)

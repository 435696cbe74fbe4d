-- Announce a live worker, and whether it claims jobs. What it holds for jobs lives as long.
--
-- KEYS[1] workers  KEYS[2] worker card  KEYS[3] what it holds
-- ARGV[1] worker  ARGV[2] card  ARGV[3] milliseconds until it expires  ARGV[4] 1 if it claims jobs,
-- else 0
-- Output how many digests of what it holds are known
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
if ARGV[4] == '1' then
  redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
  redis.call('PEXPIRE', KEYS[3], ARGV[3])
else
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('DEL', KEYS[3])
end
return redis.call('SCARD', KEYS[3])

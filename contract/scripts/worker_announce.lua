-- Announce a live worker, and whether it claims jobs.
--
-- KEYS[1] workers  KEYS[2] worker card
-- ARGV[1] worker  ARGV[2] card  ARGV[3] milliseconds until it expires  ARGV[4] 1 if it claims jobs,
-- else 0
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
if ARGV[4] == '1' then
  redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return 1

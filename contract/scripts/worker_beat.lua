-- Renew the lease of a worker, if Redis has the worker's connection to its channel.
--
-- Redis drops the subscription when the worker's process ends, so worker_watch detects that at
-- once. A worker without a subscription is not watched: only the leases of its jobs expire.
--
-- KEYS[1] watched workers
-- ARGV[1] worker  ARGV[2] its channel  ARGV[3] lease in milliseconds, 0 to end it
-- Output 1 if the worker is watched, else 0
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- PUBSUB fails if the user may not run it.
local seen = redis.pcall('PUBSUB', 'NUMSUB', ARGV[2])
if seen.err or tonumber(seen[2]) == 0 or ARGV[3] == '0' then
  redis.call('ZREM', KEYS[1], ARGV[1])
  return 0
end
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
return 1

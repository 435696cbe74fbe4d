-- Return the current workers and jobs of a model.
--
-- A process that removes a job from the queue removes it from the arrivals too, except older
-- processes without arrivals. Jobs that expire also leave entries. This script drops such entries
-- at the front, some on each call.
--
-- KEYS[1] workers  KEYS[2] waiting  KEYS[3] leases  KEYS[4] active tenants  KEYS[5] arrivals
-- KEYS[6] waiting batch jobs
-- ARGV[1] job prefix
-- Output {workers that claim jobs, waiting jobs, leased jobs, tenants with waiting jobs,
-- milliseconds that the oldest of these jobs has waited, waiting batch jobs}: batch jobs count only
-- in the last number and as leased jobs
local workers, waiting, leases, active, arrivals = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local most_dropped = 100
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', workers, '-inf', now)

local oldest = 0
for _ = 1, most_dropped do
  local first = redis.call('ZRANGE', arrivals, 0, 0, 'WITHSCORES')
  if not first[1] then break end
  if redis.call('HGET', ARGV[1] .. first[1], 'worker') == '' then
    oldest = math.max(now - first[2], 0)
    break
  end
  redis.call('ZREM', arrivals, first[1])
end
return {redis.call('ZCARD', workers), tonumber(redis.call('GET', waiting) or '0'),
  redis.call('ZCARD', leases), redis.call('ZCARD', active), oldest,
  tonumber(redis.call('GET', KEYS[6]) or '0')}

-- Tell how a model is served right now.
--
-- KEYS[1] workers  KEYS[2] waiting  KEYS[3] leases
-- Output {workers that claim jobs, waiting jobs, leased jobs}
local time = redis.call('TIME')
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', time[1] * 1000 + math.floor(time[2] / 1000))
return {redis.call('ZCARD', KEYS[1]), tonumber(redis.call('GET', KEYS[2]) or '0'), redis.call('ZCARD', KEYS[3])}

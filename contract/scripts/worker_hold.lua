-- Update what a worker holds, for the affinity of jobs (see job_claim).
--
-- The holders name one worker for each digest. An entry may be out of date, so whoever uses it looks
-- into what that worker holds. Random entries go if there are too many: this costs cache hits only.
--
-- KEYS[1] what the worker holds  KEYS[2] holders
-- ARGV[1] worker  ARGV[2] milliseconds until the former expires  ARGV[3] 1 to forget it first, else 0
-- ARGV[4] most holders  ARGV[5] number of removed digests
-- ARGV[6..] removed digests, then added ones
-- Output how many digests the worker holds
local held, holders, worker = KEYS[1], KEYS[2], ARGV[1]
local first_added = 6 + ARGV[5]
if ARGV[3] == '1' then redis.call('DEL', held) end
for i = 6, first_added - 1 do
  redis.call('SREM', held, ARGV[i])
  if redis.call('HGET', holders, ARGV[i]) == worker then redis.call('HDEL', holders, ARGV[i]) end
end
for i = first_added, #ARGV do
  redis.call('SADD', held, ARGV[i])
  redis.call('HSET', holders, ARGV[i], worker)
end
redis.call('PEXPIRE', held, ARGV[2])
local excess = redis.call('HLEN', holders) - ARGV[4]
if excess > 0 then
  redis.call('HDEL', holders, unpack(redis.call('HRANDFIELD', holders, math.min(excess, 1000))))
end
return redis.call('SCARD', held)

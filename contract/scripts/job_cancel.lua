-- Take a job back, waiting or leased. A worker that holds it is told through its control list.
--
-- What was served stays charged; a job that waited is not charged at all.
--
-- KEYS[1] active tenants  KEYS[2] last active  KEYS[3] the tenant's queue  KEYS[4] leases  KEYS[5] waiting  KEYS[6] job
-- ARGV[1] id  ARGV[2] tenant  ARGV[3] control prefix
-- Output 0 unknown (finished, or cancelled before), 1 was waiting, 2 was leased
local active, last, queue, leases, waiting, key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local worker = redis.call('HGET', key, 'worker')
if not worker then return 0 end
redis.call('DEL', key)
if worker ~= '' then
  redis.call('ZREM', leases, ARGV[1])
  redis.call('RPUSH', ARGV[3] .. worker, ARGV[1])
  redis.call('PEXPIRE', ARGV[3] .. worker, 60000)
  return 2
end
if redis.call('LREM', queue, 1, ARGV[1]) == 1 then redis.call('DECR', waiting) end
if redis.call('LLEN', queue) == 0 and redis.call('ZREM', active, ARGV[2]) == 1 then
  redis.call('SET', last, ARGV[2])
end
return 1

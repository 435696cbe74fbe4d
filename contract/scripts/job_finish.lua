-- End a leased job: charge its last tokens and forget it.
--
-- KEYS[1] active tenants  KEYS[2] service counters  KEYS[3] leases  KEYS[4] job
-- ARGV[1] id  ARGV[2] worker  ARGV[3] attempt  ARGV[4] completion tokens in all  ARGV[5] cost of a completion token
-- Output 1 finished, 0 not this worker's any more (nothing is changed)
local active, counters, leases, key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local job = redis.call('HMGET', key, 'worker', 'attempt', 'tenant', 'weight', 'charged')
if job[1] ~= ARGV[2] or job[2] ~= ARGV[3] then return 0 end
local new_tokens = ARGV[4] - job[5]
if new_tokens > 0 then
  local cost = string.format('%.17g', ARGV[5] * new_tokens / job[4])
  redis.call('ZADD', active, 'XX', redis.call('HINCRBYFLOAT', counters, job[3], cost), job[3])
end
redis.call('ZREM', leases, ARGV[1])
redis.call('DEL', key)
return 1

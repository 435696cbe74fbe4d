-- End a leased job: charge its last tokens and leave a receipt, the final counts, for its gateway.
--
-- A receipt names no worker, so that whatever asks for one finds none; gateway and attempt tell whose end it is.
-- It keeps the job's expiry, and is not written at all if the gateway has settled the job already.
--
-- KEYS[1] active tenants  KEYS[2] service counters  KEYS[3] leases  KEYS[4] job
-- ARGV[1] id  ARGV[2] worker  ARGV[3] attempt  ARGV[4] cost of a completion token
-- ARGV[5] completion tokens in all  ARGV[6] prompt tokens  ARGV[7] cached tokens
-- Output 1 finished, 0 not this worker's any more (nothing is changed)
local active, counters, leases, key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local job = redis.call('HMGET', key, 'worker', 'attempt', 'tenant', 'weight', 'charged', 'settled', 'gateway')
if job[1] ~= ARGV[2] or job[2] ~= ARGV[3] then return 0 end
local new_tokens = ARGV[5] - job[5]
if new_tokens > 0 then
  local cost = string.format('%.17g', ARGV[4] * new_tokens / job[4])
  redis.call('ZADD', active, 'XX', redis.call('HINCRBYFLOAT', counters, job[3], cost), job[3])
end
redis.call('ZREM', leases, ARGV[1])
local expiry = redis.call('PTTL', key)
redis.call('DEL', key)
if not job[6] then
  redis.call('HSET', key, 'ended', 1, 'completion', ARGV[5], 'prompt', ARGV[6], 'cached', ARGV[7],
    'gateway', job[7], 'attempt', ARGV[3])
  redis.call('PEXPIRE', key, expiry)
end
return 1

-- Charge the tenant of a leased job for work of its worker besides tokens.
--
-- KEYS[1] job
-- KEYS[2..3] of requests: active tenants, service counters  KEYS[4..5] the same of batch jobs
-- ARGV[1] worker  ARGV[2] attempt  ARGV[3] service units before the division by the weight
-- Output 1 charged, 0 no longer leased to this worker (nothing is changed)
local job = call('HMGET', KEYS[1], 'worker', 'attempt', 'tenant', 'weight', 'place')
if job[1] ~= ARGV[1] or job[2] ~= ARGV[2] then return 0 end
local lane = is_batch(job[5]) and 4 or 2
charge(KEYS[lane], KEYS[lane + 1], job[3], ARGV[3] / job[4])
return 1

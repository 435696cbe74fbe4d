-- End a leased job: charge what is left (see job_extend) and leave a receipt, the final counts, for
-- its gateway.
--
-- A receipt has no worker field, so checks for the lease holder fail; gateway and attempt identify
-- what ended.
--
-- KEYS[1] leases  KEYS[2] job
-- KEYS[3..4] of requests: active tenants, service counters  KEYS[5..6] the same of batch jobs
-- ARGV[1] id  ARGV[2] worker  ARGV[3] attempt  ARGV[4] cost of a completion token
-- ARGV[5] completion tokens in all  ARGV[6] prompt tokens  ARGV[7] cached tokens
-- ARGV[8] cost of a prompt token
-- Output 1 finished, 0 no longer leased to this worker (nothing is changed)
local leases, key = KEYS[1], KEYS[2]
local job = redis.call('HMGET', key, 'worker', 'attempt', 'tenant', 'weight', 'charged', 'settled',
  'gateway', 'place', 'uncached', 'engine')
if job[1] ~= ARGV[2] or job[2] ~= ARGV[3] then return 0 end
local new_tokens = math.max(ARGV[5] - job[5], 0)
local prompt = uncharged_prompt(job[9], ARGV[6], ARGV[7])
if new_tokens > 0 or prompt ~= 0 then
  local lane = is_batch(job[8]) and 5 or 3
  charge(KEYS[lane], KEYS[lane + 1], job[3], (ARGV[4] * new_tokens + ARGV[8] * prompt) / job[4])
end
redis.call('ZREM', leases, ARGV[1])
leave_receipt(key, job[6], ARGV[5], ARGV[6], ARGV[7], job[7], ARGV[3], job[10])
return 1

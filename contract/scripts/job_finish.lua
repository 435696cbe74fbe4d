-- End leased jobs of a worker: charge what is left (see job_extend) and leave receipts, the final
-- counts, for their gateways.
--
-- A receipt has no worker field, so checks for the lease holder fail; gateway and attempt identify
-- what ended.
--
-- KEYS[1] leases
-- KEYS[2..3] of requests: active tenants, service counters  KEYS[4..5] the same of batch jobs
-- KEYS[6..] one job hash for each job
-- ARGV[1] worker  ARGV[2] cost of a completion token  ARGV[3] cost of a prompt token
-- ARGV[4..] for each job: id, attempt, completion tokens in all, prompt tokens, cached tokens
-- Output how many jobs were finished; jobs no longer leased to this worker do not change
local worker, completion_cost, prompt_cost = ARGV[1], ARGV[2], ARGV[3]
local ended, costs = {}, {[2] = {}, [4] = {}}
for i = 1, #KEYS - 5 do
  local key, a = KEYS[5 + i], 5 * i - 1
  local attempt, completion, tokens, cached = ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4]
  local job = call('HMGET', key, 'worker', 'attempt', 'tenant', 'weight', 'charged', 'place',
    'uncached', 'settled', 'gateway', 'engine')
  if job[1] == worker and job[2] == attempt then
    add_cost(costs, job, completion, tokens, cached, completion_cost, prompt_cost)
    leave_receipt(key, job[8], completion, tokens, cached, job[9], attempt, job[10])
    ended[#ended + 1] = ARGV[a]
  end
end
charge_all(costs)
call_in_parts('ZREM', KEYS[1], ended)
return #ended

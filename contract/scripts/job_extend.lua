-- Renew a worker's leases, store the counts that it reports, charge the tokens generated since the
-- last report, and correct the charge for the prompt by the first count of its cached tokens.
--
-- Reports contain totals, not differences, so that a repeated report charges nothing. A cancelled
-- job is reported as lost, in case the worker's control list was lost, but stays leased until the
-- worker has ended it.
--
-- KEYS[1] leases
-- KEYS[2..3] of requests: active tenants, service counters  KEYS[4..5] the same of batch jobs
-- ARGV[1] job prefix  ARGV[2] worker  ARGV[3] cost of a completion token
-- ARGV[4] lease in milliseconds  ARGV[5] cost of a prompt token
-- ARGV[6..] for each job: id, attempt, completion tokens so far, prompt tokens, cached tokens
-- Output the ids of jobs that the worker must abort and end: cancelled, ended, or leased to another
-- worker
local leases = KEYS[1]
local expiry = now_ms() + ARGV[4]
local lost, held, costs = {}, {}, {[2] = {}, [4] = {}}
for i = 6, #ARGV, 5 do
  local id, key = ARGV[i], ARGV[1] .. ARGV[i]
  local job = call('HMGET', key, 'worker', 'attempt', 'tenant', 'weight', 'charged',
    'cancelled', 'place', 'uncached', 'reported')
  local is_held = job[1] == ARGV[2] and job[2] == ARGV[i + 1]
  if is_held then
    local charged, completion = tonumber(job[5]), tonumber(ARGV[i + 2])
    local prompt = uncharged_prompt(job[8], ARGV[i + 3], ARGV[i + 4])
    if completion > charged or prompt ~= 0 then
      local lane, tokens = costs[is_batch(job[7]) and 4 or 2], math.max(completion - charged, 0)
      local cost = (ARGV[3] * tokens + ARGV[5] * prompt) / job[4]
      lane[job[3]] = (lane[job[3]] or 0) + cost
      charged = charged + tokens
    end
    call('HSET', key, 'charged', charged, 'completion', ARGV[i + 2], 'prompt', ARGV[i + 3],
      'cached', ARGV[i + 4])
    if job[9] or job[8] and ARGV[i + 3] ~= '0' then
      call('HDEL', key, 'reported', ARGV[i + 3] == '0' and 'reported' or 'uncached')
    end
    held[#held + 1] = expiry
    held[#held + 1] = id
  end
  if not is_held or job[6] then lost[#lost + 1] = id end
end
for lane, tenants in pairs(costs) do
  for tenant, cost in pairs(tenants) do charge(KEYS[lane], KEYS[lane + 1], tenant, cost) end
end
call_in_parts('ZADD', leases, held)
return lost

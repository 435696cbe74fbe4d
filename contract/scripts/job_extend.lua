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
  local job = call('HMGET', key, 'worker', 'attempt', 'tenant', 'weight', 'charged', 'place',
    'uncached', 'cancelled', 'reported')
  local is_held = job[1] == ARGV[2] and job[2] == ARGV[i + 1]
  if is_held then
    local charged = add_cost(costs, job, ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[3], ARGV[5])
    call('HSET', key, 'charged', charged, 'completion', ARGV[i + 2], 'prompt', ARGV[i + 3],
      'cached', ARGV[i + 4])
    if job[9] or job[7] and ARGV[i + 3] ~= '0' then
      call('HDEL', key, 'reported', ARGV[i + 3] == '0' and 'reported' or 'uncached')
    end
    held[#held + 1] = expiry
    held[#held + 1] = id
  end
  if not is_held or job[8] then lost[#lost + 1] = id end
end
charge_all(costs)
call_in_parts('ZADD', leases, held)
return lost

-- Renew a worker's leases, store the counts that it reports, charge the tokens generated since the
-- last report, and correct the charge for the prompt by the first count of its cached tokens.
--
-- Reports contain totals, not differences, so that a repeated report charges nothing. A cancelled
-- job is reported as lost, in case the worker's control list was lost, but stays leased until the
-- worker has ended it.
--
-- KEYS leases, then the active tenants and service counters of each lane
-- ARGV worker, lease_ms, completion_cost and prompt_cost: of a token, in service units, then for
--   each job: id, attempt, completion tokens so far, prompt tokens, cached tokens
-- Output the ids of jobs that the worker must abort and end: cancelled, ended, or leased to another
-- worker
-- @include reports
local leases, active, counters, batch_active, batch_counters = unpack(KEYS, 1, 5)
local job_prefix, worker, lease_ms, completion_cost, prompt_cost = unpack(ARGV, 1, 5)
local expiry = now_ms() + lease_ms
local lost, held = {}, {}
for i = 6, #ARGV, 5 do
  local id, attempt, completion, prompt, cached = unpack(ARGV, i, i + 4)
  local key = job_prefix .. id
  local holder, current, tenant, weight, charged, place, uncached, cancelled, reported = unpack(
    call('HMGET', key, 'worker', 'attempt', 'tenant', 'weight', 'charged', 'place', 'uncached',
      'cancelled', 'reported'))
  local is_held = holder == worker and current == attempt
  if is_held then
    local tokens, correction = uncharged(charged, uncached, completion, prompt, cached)
    add_cost(place, tenant, (completion_cost * tokens + prompt_cost * correction) / weight)
    call('HSET', key, 'charged', charged + tokens, 'completion', completion, 'prompt', prompt,
      'cached', cached)
    if reported or uncached and prompt ~= '0' then
      call('HDEL', key, 'reported', prompt == '0' and 'reported' or 'uncached')
    end
    held[#held + 1] = expiry
    held[#held + 1] = id
  end
  if not is_held or cancelled then lost[#lost + 1] = id end
end
charge_all(active, counters, batch_active, batch_counters)
call_in_parts('ZADD', leases, held)
return lost

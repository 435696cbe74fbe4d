-- End leased jobs of a worker: charge what is left (see job_extend) and leave receipts, the final
-- counts, for their gateways.
--
-- A receipt has no worker field, so checks for the lease holder fail; gateway and attempt identify
-- what ended.
--
-- KEYS leases, then the active tenants and service counters of each lane, then each job
-- ARGV worker, completion_cost and prompt_cost: of a token, in service units, then for each job: id,
--   attempt, completion tokens in all, prompt tokens, cached tokens
-- Output how many jobs were finished; jobs no longer leased to this worker do not change
-- @include reports
-- @include receipts
local leases, active, counters, batch_active, batch_counters = unpack(KEYS, 1, 5)
local worker, completion_cost, prompt_cost = unpack(ARGV, 1, 3)
local first_key, first_report, ended = 6, 4, {}
for i = first_report, #ARGV, 5 do
  local id, attempt, completion, prompt, cached = unpack(ARGV, i, i + 4)
  local key = KEYS[first_key + (i - first_report) / 5]
  local holder, current, tenant, weight, charged, place, uncached, settled, gateway, engine = unpack(
    call('HMGET', key, 'worker', 'attempt', 'tenant', 'weight', 'charged', 'place', 'uncached',
      'settled', 'gateway', 'engine'))
  if holder == worker and current == attempt then
    local tokens, correction = uncharged(charged, uncached, completion, prompt, cached)
    add_cost(place, tenant, (completion_cost * tokens + prompt_cost * correction) / weight)
    leave_receipt(key, settled, completion, prompt, cached, gateway, attempt, engine)
    ended[#ended + 1] = id
  end
end
charge_all(active, counters, batch_active, batch_counters)
call_in_parts('ZREM', leases, ended)
return #ended

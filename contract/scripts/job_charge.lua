-- Charge the tenant of a leased job for work of its worker besides tokens.
--
-- KEYS job, then the active tenants and service counters of each lane
-- ARGV worker, attempt, units: service units before the division by the weight
-- Output 1 charged, 0 no longer leased to this worker (nothing is changed)
-- @include places
-- @include counters
local key, active, counters, batch_active, batch_counters = unpack(KEYS, 1, 5)
local worker, attempt, units = unpack(ARGV, 1, 3)
local holder, current, tenant, weight, place = unpack(
  call('HMGET', key, 'worker', 'attempt', 'tenant', 'weight', 'place'))
if holder ~= worker or current ~= attempt then return 0 end
if is_batch(place) then active, counters = batch_active, batch_counters end
charge(active, counters, tenant, units / weight)
return 1

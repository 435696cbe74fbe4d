-- Service counters of the tenants, one for each lane (VTC, OSDI'24).
-- @include doorbell

-- Add a tenant to the active tenants. Its counter is raised to the lowest of theirs, so that idle
-- time earns no credit. If no tenant is active, it is raised to that of the tenant that was active
-- last.
local function begin_waiting(lane, tenant)
  local counter = call('HGET', lane.counters, tenant)
  local lift = call('ZRANGE', lane.active, 0, 0, 'WITHSCORES')[2]
  if not lift then
    local leaver = call('GET', lane.last)
    lift = leaver and leaver ~= tenant and call('HGET', lane.counters, leaver) or '0'
  end
  if not counter or tonumber(lift) > tonumber(counter) then
    counter = lift
    call('HSET', lane.counters, tenant, counter)
  end
  call('ZADD', lane.active, counter, tenant)
  -- A full worker may preempt jobs of other tenants for it.
  local doorbell = call('ZPOPMIN', lane.full)[1]
  if doorbell then ring_own(doorbell) end
end

-- Charge a tenant for its service, whether it has waiting jobs or not. A caller that removes it from
-- the active tenants passes false for them.
local function charge(active, counters, tenant, cost)
  local score = call('HINCRBYFLOAT', counters, tenant, string.format('%.17g', cost))
  if active then call('ZADD', active, 'XX', score, tenant) end
end

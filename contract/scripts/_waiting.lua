-- Single jobs enter and leave the queue of their tenant.
-- @include lanes
-- @include places
-- @include counters

-- Return a function that finds the lane of a place; the keys of both lanes start at this key.
local function lanes_at(k)
  local requests, batch = lane_at(k), lane_at(k + 11)
  return function(place) return is_batch(place) and batch or requests end
end

-- Remove a waiting job of a tenant. Return whether the tenant is not active any more.
local function remove_job(lane, queue, tenant_pace, tenant, id, rank)
  if call('ZREM', queue, id) == 1 then
    call('ZREM', lane.arrivals, id)
    call('DECR', lane.waiting)
    recount(lane.sheddable, queue, tenant, rank)
  end
  if call('ZCARD', queue) > 0 or call('ZREM', lane.active, tenant) == 0 then return false end
  call('SET', lane.last, tenant)
  call('HDEL', tenant_pace, 'at', 'given')
  return true
end

-- Remove a waiting job that no other replaces, so that the lane may become empty.
local function leave(lane, tenant, id, rank)
  if remove_job(lane, lane.queue, lane.tenant_pace, tenant, id, rank)
    and call('ZCARD', lane.active) == 0 then
    call('HDEL', lane.pace, 'at', 'given')
  end
end

-- Add a waiting job of a tenant at a place.
local function enter(lane, tenant, id, place, arrived)
  call('ZADD', lane.queue, place, id)
  call('ZADD', lane.arrivals, arrived, id)
  recount(lane.sheddable, lane.queue, tenant, rank_of(place))
  if not call('ZSCORE', lane.active, tenant) then begin_waiting(lane, tenant) end
  call('INCR', lane.waiting)
  call('RPUSH', lane.doorbell, 1)
end

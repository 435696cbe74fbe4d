-- Raise jobs of one tenant to a higher tier, each if it is in a lower one.
--
-- A waiting job goes to the place that it would have if it had been enqueued in the new tier. A
-- leased job stays with its worker, and returns to the new tier if it is requeued.
--
-- KEYS the eleven keys of each lane and the tenant (see _lanes), then jobs
-- ARGV tenant, new_rank: of the new tier, then the boosts of the tiers by rank, and the jobs' ids
-- Output how many jobs were raised
-- @include waiting
local tenant, new_rank = unpack(ARGV, 1, 2)
local first_job, first_boost, first_id, raised, lane_of = 23, 3, 7, 0, lanes_at(1)
new_rank = tonumber(new_rank)

local function move(id, rank, from, to, place)
  if from ~= to then
    local arrived = call('ZSCORE', from.arrivals, id) or now_ms()
    leave(from, tenant, id, rank)
    return enter(to, tenant, id, place, arrived)
  end
  call('ZADD', to.queue, place, id)
  recount(to.sheddable, to.queue, tenant, rank)
  recount(to.sheddable, to.queue, tenant, new_rank)
  call('RPUSH', to.doorbell, 1)
end

for i = first_job, #KEYS do
  local key, id = KEYS[i], ARGV[first_id + i - first_job]
  local old, weight = unpack(call('HMGET', key, 'place', 'weight'))
  local rank = old and rank_of(old) or 0
  if rank > new_rank then
    local new = new_rank * tier_span + old % tier_span
    weight = weight / ARGV[first_boost + rank] * ARGV[first_boost + new_rank]
    call('HSET', key, 'place', string.format('%.0f', new),
      'weight', string.format('%.17g', weight))
    local from, to = lane_of(old), lane_of(new)
    local score = call('ZSCORE', from.queue, id)
    if score then move(id, rank, from, to, new + (score - old)) end
    raised = raised + 1
  end
end
return raised

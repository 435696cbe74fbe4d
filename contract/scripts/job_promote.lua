-- Raise jobs of one tenant to a higher tier, each if it is in a lower one.
--
-- A waiting job goes to the place that it would have if it had been enqueued in the new tier. A
-- leased job stays with its worker, and returns to the new tier if it is requeued.
--
-- KEYS[1..10] of requests: active tenants, service counters, last active, waiting, doorbell,
-- sheddable, the model's pace, arrivals, the tenant's queue, the tenant's pace
-- KEYS[11..20] the same of batch jobs  KEYS[21..] jobs
-- ARGV[1] tenant  ARGV[2] rank of the new tier  ARGV[3..6] boosts of the tiers, by rank
-- ARGV[7..] id of each job
-- Output how many jobs were raised
local first_job, tenant, rank = 20, ARGV[1], tonumber(ARGV[2])
local boost = ARGV[3 + rank]
local raised = 0

local function lane_of(place) return is_batch(place) and 11 or 1 end

local function leave(lane, id)
  local active, queue = KEYS[lane], KEYS[lane + 8]
  call('ZREM', queue, id)
  call('DECR', KEYS[lane + 3])
  if call('ZCARD', queue) == 0 and call('ZREM', active, tenant) == 1 then
    call('SET', KEYS[lane + 2], tenant)
    call('HDEL', KEYS[lane + 9], 'at', 'given')
    if call('ZCARD', active) == 0 then call('HDEL', KEYS[lane + 6], 'at', 'given') end
  end
end

local function enter(lane)
  if call('ZCARD', KEYS[lane + 8]) == 0 then
    begin_waiting(KEYS[lane], KEYS[lane + 1], KEYS[lane + 2], tenant)
  end
  call('INCR', KEYS[lane + 3])
end

local function move(id, old_place, new_place, score)
  local from, to = lane_of(old_place), lane_of(new_place)
  local arrived = call('ZSCORE', KEYS[from + 7], id)
  if from ~= to then
    leave(from, id)
    enter(to)
    call('ZREM', KEYS[from + 7], id)
  end
  call('ZADD', KEYS[to + 8], new_place + (score - old_place), id)
  call('ZADD', KEYS[to + 7], arrived or now_ms(), id)
  recount(KEYS[from + 5], KEYS[from + 8], tenant, math.floor(old_place / tier_span))
  recount(KEYS[to + 5], KEYS[to + 8], tenant, rank)
  call('RPUSH', KEYS[to + 4], 1)
end

for i = first_job + 1, #KEYS do
  local id = ARGV[6 + i - first_job]
  local job = call('HMGET', KEYS[i], 'worker', 'place', 'weight')
  local old_rank = job[1] and math.floor(job[2] / tier_span) or 0
  if old_rank > rank then
    local place = rank * tier_span + job[2] % tier_span
    call('HSET', KEYS[i], 'place', string.format('%.0f', place),
      'weight', string.format('%.17g', job[3] / ARGV[3 + old_rank] * boost))
    local score = call('ZSCORE', KEYS[lane_of(job[2]) + 8], id)
    if score then move(id, job[2], place, score) end
    raised = raised + 1
  end
end
return raised

-- Shedding: in a full queue, jobs of lower tiers that never started make room for others.
-- @include waiting

-- Return the rank of the lowest tier of which jobs can be shed, or -1.
local function lowest_tier(lane)
  local bottom = call('ZREVRANGE', lane.sheddable, 0, 0, 'WITHSCORES')[2]
  return bottom and rank_of(bottom) or -1
end

-- Count the jobs of the lane's tenant below a tier that can be shed.
local function count_own(lane, rank)
  local own = 0
  for tier = lowest_tier(lane), rank + 1, -1 do
    own = own + call('ZCOUNT', lane.queue, tier * tier_span + begun_span,
      (tier + 1) * tier_span - 1)
  end
  return own
end

-- Count the jobs of all tenants below a tier that can be shed, as far as needed.
local function count_all(lane, rank, needed)
  local found, entries = 0, call('ZREVRANGEBYSCORE', lane.sheddable, '+inf',
    (rank + 1) * tier_span, 'WITHSCORES', 'LIMIT', 0, needed)
  for i = 2, #entries, 2 do found = found + entries[i] % tier_span end
  return found
end

-- Shed the newest job of a tenant in a tier, and append its gateway and handle to `out`. Return
-- false if there is none.
local function shed(lane, queue, tenant_pace, tenant, tier, job_prefix, out)
  local newest = call('ZREVRANGEBYSCORE', queue, (tier + 1) * tier_span - 1,
    tier * tier_span + begun_span, 'LIMIT', 0, 1)[1]
  if not newest then
    recount(lane.sheddable, queue, tenant, tier)
    return false
  end
  local gateway, handle = unpack(call('HMGET', job_prefix .. newest, 'gateway', 'handle'))
  call('DEL', job_prefix .. newest)
  remove_job(lane, queue, tenant_pace, tenant, newest, tier)
  if gateway then out[#out + 1], out[#out + 2] = gateway, handle end
  return true
end

-- Enqueue all jobs of one request or none: its first part is admitted for all of them. Jobs of
-- several requests are enqueued together only if that needs no decision about one of them.
--
-- Jobs of one tenant are ordered by the rank of their tier, then those that started before, then by
-- arrival.
--
-- If the queue is full, jobs of lower tiers that never started are shed: the lowest tier first, of
-- the tenant that has most jobs of it, the newest job first. Nothing is shed unless the request
-- then has room. A request is also rejected if it would wait longer than allowed, at the pace of
-- recent claims (see _pace). A rejected request receives a retry time (see _promises).
--
-- KEYS sequence, promises, tenant_promises: of the lane, and of the tenant in it; then the eleven keys
-- of the tier's lane and the tenant (see _lanes), then one job hash for each job
-- ARGV rank: of the jobs' tier, 0 goes first
--   most_waiting, most_waiting_of_tenant: jobs  longest_wait: in milliseconds
--   expires_ms: milliseconds after which an abandoned job disappears
--   admitted: jobs that need room, including later parts; 0: they were admitted with an earlier part
--   is_shared: 1 for one job of each of several requests, else 0
--   then for each job: id, prompt tokens, sequences, KV-cache tokens needed, gateway, handle,
--   payload, affinity (see contract.affinity), digest of its adapter; empty: none, model share of
--   its tenant in percent
-- Output {code, waiting jobs of the model, milliseconds after which to retry, gateway, handle,
-- ...}: code 1 enqueued, 0 duplicate, -1 model full, -2 tenant full, -3 would wait too long, -4
-- nothing is done: the requests must be enqueued one by one; 0 milliseconds if the pace is unknown;
-- gateway and handle of each job that was shed, to which the milliseconds then apply
-- @include promises
-- @include shedding
local sequence, promises, tenant_promises = unpack(KEYS, 1, 3)
local tenant, weight, rank, most_waiting, most_waiting_of_tenant, longest_wait, expires_ms, admitted,
  job_prefix, queue_prefix, pace_prefix, is_shared = unpack(ARGV, 1, 12)
local first_job, first_argument, fields = 14, 13, 10
local lane, jobs = lane_at(4), #KEYS - first_job
local queue, first_id = lane.queue, ARGV[first_argument]
rank, admitted, most_waiting = tonumber(rank), tonumber(admitted), tonumber(most_waiting)
local is_later_part = admitted == 0
local enough_seconds, most_rings = 5, 256
local depth = tonumber(call('GET', lane.waiting) or '0')
local tenant_depth = call('ZCARD', queue)
local now = now_ms()

-- One command for keys that usually are absent.
is_shared = is_shared == '1'
local has_promises = call('EXISTS', promises, tenant_promises,
  unpack(KEYS, first_job + 1, is_shared and #KEYS or first_job + 1)) > 0
if is_shared and has_promises then return {-4, depth, 0} end
if has_promises and call('EXISTS', KEYS[first_job + 1]) == 1 then return {0, depth, 0} end

-- Return the pace of the tenant: the measured one, unless its share of the model's is higher.
local function pace_of_tenant()
  local rate, gap, seconds = pace_of(lane.tenant_pace)
  local model_rate, model_gap, model_seconds = pace_of(lane.pace)
  local share = model_rate and model_rate / math.max(call('ZCARD', lane.active), 1)
  if not share or (rate and rate > share) then return rate, gap, seconds end
  return share, model_gap, model_seconds
end

-- Held places do not reject a request that could shed a job.
local held, tenant_held, excess, tenant_excess = 0, 0, 0, 0
if not is_later_part then
  if has_promises then
    held = held_places(lane.pace, promises, admitted, most_waiting, now)
    tenant_held = held_places(lane.tenant_pace, tenant_promises, admitted, most_waiting_of_tenant,
      now)
  end
  excess, tenant_excess = depth + admitted - most_waiting,
    tenant_depth + admitted - most_waiting_of_tenant
end
if is_shared and math.max(excess, tenant_excess) > 0 then return {-4, depth, 0} end
if tenant_excess + tenant_held > 0 and count_own(lane, rank) < math.max(tenant_excess, 1) then
  return {-2, depth, promise(lane.tenant_pace, tenant_promises, first_id, admitted, now,
    pace_of_tenant())}
end
if excess + held > 0 then
  local needed = math.max(excess, 1)
  if count_all(lane, rank, needed) < needed then
    return {-1, depth, promise(lane.pace, promises, first_id, admitted, now, pace_of(lane.pace))}
  end
end

-- The tenant's jobs of this tier and above go first, at a pace that may exceed the tenant's
-- measured pace.
if tenant_depth > 0 and not is_later_part then
  local ahead = call('ZCOUNT', queue, '-inf', (rank + 1) * tier_span - 1)
  local rate, gap, seconds = nil, nil, 0
  if ahead > 0 then rate, gap, seconds = pace_of_tenant() end
  local wait = seconds >= enough_seconds and (ahead + admitted - 1) / rate or 0
  if wait > tonumber(longest_wait) then
    if is_shared then return {-4, depth, 0} end
    return {-3, depth, math.ceil(wait - longest_wait + gap)}
  end
end

local out = {1, 0, 0}
local tier = tenant_excess > 0 and lowest_tier(lane) or -1
while tenant_excess > 0 and tier > rank do
  if shed(lane, queue, lane.tenant_pace, tenant, tier, job_prefix, out) then
    depth, excess, tenant_excess = depth - 1, excess - 1, tenant_excess - 1
  else
    tier = tier - 1
  end
end
while excess > 0 do
  local most = call('ZREVRANGE', lane.sheddable, 0, 0)[1]
  local its_tier, owner = string.match(most or '0 ', '^(%d+) (.*)$')
  its_tier = tonumber(its_tier)
  if its_tier <= rank then break end
  if shed(lane, queue_prefix .. owner, pace_prefix .. owner, owner, its_tier, job_prefix, out) then
    depth, excess = depth - 1, excess - 1
  end
end

-- Shed jobs may have been this tenant's own.
local was_empty = tenant_depth == 0 or call('ZCARD', queue) == 0
if was_empty then begin_waiting(lane, tenant) end

local placed, arrived, arrival = {}, {}, string.format('%.0f', now)
local before = rank * tier_span + call('INCRBY', sequence, jobs) - jobs
for i = 1, jobs do
  local a = first_argument + (i - 1) * fields
  local id, prompt_tokens, sequences, need_tokens, gateway, handle, payload, affinity, adapter,
    share = unpack(ARGV, a, a + fields - 1)
  -- A job that returns to the queue goes before all jobs that never started.
  local key, place = KEYS[first_job + i], string.format('%.0f', before + i)
  call('HSET', key, 'tenant', tenant, 'weight', weight, 'prompt_tokens', prompt_tokens,
    'sequences', sequences, 'need_tokens', need_tokens, 'gateway', gateway, 'handle', handle,
    'payload', payload, 'place', place, 'attempt', '0', 'charged', '0', 'worker', '')
  if affinity ~= '' then call('HSET', key, 'affinity', affinity) end
  if adapter ~= '' then call('HSET', key, 'adapter', adapter) end
  if share ~= '100' then call('HSET', key, 'share', share) end
  call('PEXPIRE', key, expires_ms)
  placed[2 * i - 1], placed[2 * i] = before + begun_span + i, id
  arrived[2 * i - 1], arrived[2 * i] = arrival, id
end
call('ZADD', queue, unpack(placed))
call('ZADD', lane.arrivals, unpack(arrived))
if was_empty then
  call('ZADD', lane.sheddable, rank * tier_span + jobs, rank .. ' ' .. tenant)
else
  recount(lane.sheddable, queue, tenant, rank)
end
call('INCRBY', lane.waiting, jobs)
if call('RPUSH', lane.doorbell, 1) > most_rings then
  call('LTRIM', lane.doorbell, 0, most_rings - 1)
end
out[2] = depth + jobs
if #out > 3 then
  out[3] = promise(lane.pace, promises, first_id, (#out - 3) / 2, now, pace_of(lane.pace))
end
return out

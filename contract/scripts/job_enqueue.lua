-- Enqueue all jobs of one request or none: its first part is admitted for all of them.
--
-- Jobs of one tenant are ordered by the rank of their tier, then those that started before, then by
-- arrival.
--
-- If the queue is full, jobs of lower tiers that never started are shed: the lowest tier first, of
-- the tenant that has most jobs of it, the newest job first. Nothing is shed unless the request
-- then has room. A request is also rejected if it would wait longer than allowed, at the pace of
-- recent claims (see job_claim).
--
-- A rejected request receives a retry time, called a promise. Promises are spaced by the pace of
-- claims. Places are held for promises that are about to be due, up to half of the queue. A request
-- that arrives when a promise is due takes that promise; other requests are rejected until then.
-- Requests are thus served in the order in which they first arrived, and clients that retry too
-- often gain nothing.
--
-- The keys are those of the tier's lane.
--
-- KEYS[1] active tenants  KEYS[2] service counters  KEYS[3] last active  KEYS[4] waiting
-- KEYS[5] doorbell  KEYS[6] sheddable  KEYS[7] the model's pace  KEYS[8] arrivals
-- KEYS[9] the tenant's queue  KEYS[10] the tenant's pace  KEYS[11] sequence
-- KEYS[12] the model's promises  KEYS[13] the tenant's promises
-- KEYS[14..] one job hash for each job
-- ARGV[1] tenant  ARGV[2] weight  ARGV[3] most waiting jobs of the model
-- ARGV[4] most waiting jobs of the tenant
-- ARGV[5] milliseconds after which an abandoned job disappears
-- ARGV[6] rank of the jobs' tier, 0 goes first
-- ARGV[7] longest wait in milliseconds  ARGV[8] job prefix  ARGV[9] queue prefix
-- ARGV[10] pace prefix
-- ARGV[11] jobs that need room, including later parts; 0: they were admitted with an earlier part
-- ARGV[12..] for each job: id, prompt tokens, sequences, KV-cache tokens needed, gateway, handle,
-- payload, affinity (see contract.affinity), digest of its adapter; empty: none
-- Output {code, waiting jobs of the model, milliseconds after which to retry, gateway, handle,
-- ...}: code 1 enqueued, 0 duplicate, -1 model full, -2 tenant full, -3 would wait too long; 0
-- milliseconds if the pace is unknown; gateway and handle of each job that was shed, to which the
-- milliseconds then apply
local active, counters, last, waiting = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local doorbell, sheddable, model_pace = KEYS[5], KEYS[6], KEYS[7]
local arrivals, queue, tenant_pace = KEYS[8], KEYS[9], KEYS[10]
local model_promises, tenant_promises = KEYS[12], KEYS[13]
local tenant, weight, rank = ARGV[1], ARGV[2], tonumber(ARGV[6])
local job_prefix, queue_prefix, pace_prefix = ARGV[8], ARGV[9], ARGV[10]
local first_job, first_argument, fields = 13, 12, 9
local jobs, admitted = #KEYS - first_job, tonumber(ARGV[11])
local is_later_part = admitted == 0
local least_promised_ms, most_promised_ms, promise_grace_ms, enough_seconds = 1000, 60000, 2000, 5
local most_rings = 256
local depth = tonumber(call('GET', waiting) or '0')
local tenant_depth = call('ZCARD', queue)
local now = now_ms()

-- One command for three keys that usually are absent.
local has_promises = call('EXISTS', KEYS[first_job + 1], model_promises, tenant_promises) > 0
if has_promises and call('EXISTS', KEYS[first_job + 1]) == 1 then return {0, depth, 0} end

-- Returns claims per millisecond, the gap between claim calls in milliseconds, and the seconds of
-- measurement. The gap is the mean over time, computed from the squares: the mean length of the gap
-- that contains a random moment. Calls come in bursts when many sequences end at once, so this is
-- much longer than the mean over calls.
local function pace_of(key)
  local pace = call('HMGET', key, 'claims', 'squares', 'seconds')
  local claims, seconds = tonumber(pace[1] or '0'), tonumber(pace[3] or '0')
  if claims == 0 then return nil, 0, 0 end
  return claims / math.max(seconds, 1) / 1000, (pace[2] or 0) / math.max(seconds, 0.001) * 1000,
    seconds
end

local function pace_of_tenant()
  local rate, gap, seconds = pace_of(tenant_pace)
  local model_rate, model_gap, model_seconds = pace_of(model_pace)
  local share = model_rate and model_rate / math.max(call('ZCARD', active), 1)
  if not share or (rate and rate > share) then return rate, gap, seconds end
  return share, model_gap, model_seconds
end

-- Claims come in bursts, so a promised place is free one gap after its computed time.
local function promise(key, promises, number, rate, gap)
  if not rate then return 0 end
  local soonest = now + math.max(least_promised_ms - gap, 0)
  local given = math.max(tonumber(call('HGET', key, 'given') or '0'), soonest) + number / rate
  local due = given + gap
  if due > now + most_promised_ms then return most_promised_ms end
  call('HSET', key, 'given', string.format('%.3f', given))
  local due_at = string.format('%.3f', due)
  for i = 1, number do
    call('ZADD', promises, due_at, ARGV[first_argument] .. ' ' .. i)
  end
  call('PEXPIRE', promises, most_promised_ms + promise_grace_ms)
  return math.ceil(due - now)
end

-- Returns the places that are held for other requests. It is 0 for a request that takes a due
-- promise. The promise is then used up, whether the request finds room or not.
local function promised(key, promises, most)
  call('ZREMRANGEBYSCORE', promises, '-inf', now - promise_grace_ms)
  local due = call('ZRANGEBYSCORE', promises, '-inf', now, 'LIMIT', 0, admitted)
  if #due > 0 then
    call('ZREM', promises, unpack(due))
    return 0
  end
  local _, gap = pace_of(key)
  return math.min(call('ZCOUNT', promises, '-inf', now + gap), math.floor(most / 2))
end
local held, tenant_held, excess, tenant_excess = 0, 0, 0, 0

if not is_later_part then
  if has_promises then
    held = promised(model_pace, model_promises, ARGV[3])
    tenant_held = promised(tenant_pace, tenant_promises, ARGV[4])
  end
  excess, tenant_excess = depth + admitted - ARGV[3], tenant_depth + admitted - ARGV[4]
end

-- Count the jobs that can be shed, as far as needed: of this tenant, and of all tenants.
local function count_own(lowest)
  local own = 0
  for tier = lowest, rank + 1, -1 do
    own = own + call('ZCOUNT', queue, tier * tier_span + begun_span,
      (tier + 1) * tier_span - 1)
  end
  return own
end
local lowest = -1
if excess + held > 0 or tenant_excess + tenant_held > 0 then
  local bottom = call('ZREVRANGE', sheddable, 0, 0, 'WITHSCORES')[2]
  lowest = bottom and math.floor(bottom / tier_span) or -1
end
-- Held places do not reject a request that could shed a job.
if tenant_excess + tenant_held > 0 and count_own(lowest) < math.max(tenant_excess, 1) then
  return {-2, depth, promise(tenant_pace, tenant_promises, admitted, pace_of_tenant())}
end
if excess + held > 0 then
  local found, needed = 0, math.max(excess, 1)
  local entries = call('ZREVRANGEBYSCORE', sheddable, '+inf', (rank + 1) * tier_span,
    'WITHSCORES', 'LIMIT', 0, needed)
  for i = 2, #entries, 2 do found = found + entries[i] % tier_span end
  if found < needed then
    return {-1, depth, promise(model_pace, model_promises, admitted, pace_of(model_pace))}
  end
end

-- The tenant's jobs of this tier and above go first, at a pace that may exceed the tenant's
-- measured pace.
local ahead = 0
if tenant_depth > 0 and not is_later_part then
  ahead = call('ZCOUNT', queue, '-inf', (rank + 1) * tier_span - 1)
end
if ahead > 0 then
  local rate, gap, seconds = pace_of_tenant()
  local wait = seconds >= enough_seconds and (ahead + admitted - 1) / rate or 0
  if wait > tonumber(ARGV[7]) then return {-3, depth, math.ceil(wait - ARGV[7] + gap)} end
end

local out = {1, 0, 0}
local function shed(owner, tier)
  local its_queue = queue_prefix .. owner
  local newest = call('ZREVRANGEBYSCORE', its_queue, (tier + 1) * tier_span - 1,
    tier * tier_span + begun_span, 'LIMIT', 0, 1)[1]
  if not newest then
    recount(sheddable, its_queue, owner, tier)
    return false
  end
  local victim = call('HMGET', job_prefix .. newest, 'gateway', 'handle')
  call('DEL', job_prefix .. newest)
  call('ZREM', its_queue, newest)
  call('ZREM', arrivals, newest)
  call('DECR', waiting)
  recount(sheddable, its_queue, owner, tier)
  if call('ZCARD', its_queue) == 0 and call('ZREM', active, owner) == 1 then
    call('SET', last, owner)
    call('HDEL', pace_prefix .. owner, 'at', 'given')
  end
  if victim[1] then
    out[#out + 1] = victim[1]
    out[#out + 1] = victim[2]
  end
  depth, excess = depth - 1, excess - 1
  return true
end

while tenant_excess > 0 and lowest > rank do
  if shed(tenant, lowest) then tenant_excess = tenant_excess - 1 else lowest = lowest - 1 end
end
while excess > 0 do
  local most = call('ZREVRANGE', sheddable, 0, 0)[1]
  local tier, owner = string.match(most or '0 ', '^(%d+) (.*)$')
  if tonumber(tier) <= rank then break end
  shed(owner, tonumber(tier))
end

-- Shed jobs may have been this tenant's own.
local was_empty = tenant_depth == 0 or call('ZCARD', queue) == 0
if was_empty then begin_waiting(active, counters, last, tenant) end

local before = rank * tier_span + call('INCRBY', KEYS[11], jobs) - jobs
for i = 1, jobs do
  local a = first_argument + (i - 1) * fields
  -- A job that returns to the queue goes before all jobs that never started.
  local key, place = KEYS[first_job + i], string.format('%.0f', before + i)
  call('HSET', key, 'tenant', tenant, 'weight', weight, 'prompt_tokens', ARGV[a + 1],
    'sequences', ARGV[a + 2], 'need_tokens', ARGV[a + 3], 'gateway', ARGV[a + 4],
    'handle', ARGV[a + 5], 'payload', ARGV[a + 6],
    'place', place, 'attempt', '0', 'charged', '0', 'worker', '')
  if ARGV[a + 7] ~= '' then call('HSET', key, 'affinity', ARGV[a + 7]) end
  if ARGV[a + 8] ~= '' then call('HSET', key, 'adapter', ARGV[a + 8]) end
  call('PEXPIRE', key, ARGV[5])
  call('ZADD', queue, before + begun_span + i, ARGV[a])
  call('ZADD', arrivals, now, ARGV[a])
end
if was_empty then
  call('ZADD', sheddable, rank * tier_span + jobs, rank .. ' ' .. tenant)
else
  recount(sheddable, queue, tenant, rank)
end
call('INCRBY', waiting, jobs)
if call('RPUSH', doorbell, 1) > most_rings then
  call('LTRIM', doorbell, 0, most_rings - 1)
end
out[2] = depth + jobs
if #out > 3 then
  out[3] = promise(model_pace, model_promises, (#out - 3) / 2, pace_of(model_pace))
end
return out

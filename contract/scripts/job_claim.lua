-- Lease waiting jobs to a worker in fair order, as long as its engine has room.
--
-- The tenant with the lowest counter goes first, with the oldest of its jobs, and is charged for
-- the prompt tokens that the worker does not hold. If that job does not fit, claiming stops:
-- skipping to a smaller job of another tenant would break the fairness bound.
--
-- Affinity changes this order within bounds. Among the oldest jobs of the tenant's first tier, the
-- one that finds most in the worker's cache goes first. If another worker holds more of it, the job
-- is kept for that worker for as long as this one would take to process the difference, once. Other
-- tenants may then go first until their counters exceed the tenant's by a quantum. If they wait
-- beyond that, no job is kept: a worker is idle for a kept job only if nobody else waits. A job that
-- was first passed over or kept some time ago goes before all others of its tenant.
--
-- A worker has slots for a number of adapters. If the next job of a tenant needs a slot and none is
-- free, the tenants after it go first, but none of their jobs with an adapter: the running ones
-- then leave a slot for it. A worker without adapters leaves all of these jobs to others.
--
-- Batch jobs are claimed only when no request waits, in the same order by counters of their own.
-- The room of running batch jobs counts as free for requests: the worker gives these jobs back.
--
-- The pace of claims is measured while jobs wait: claims, seconds, and squares of the seconds
-- between two calls. All three decay exponentially. When a new backlog starts, they are scaled down
-- to one second of measurement (see job_enqueue).
--
-- KEYS[1] leases
-- KEYS[2..9] of requests: active tenants, service counters, last active, waiting, doorbell,
-- sheddable, the model's pace, arrivals
-- KEYS[10..17] the same of batch jobs
-- KEYS[18] holders
-- ARGV[1] job prefix  ARGV[2] worker  ARGV[3] most jobs  ARGV[4] free KV-cache tokens
-- ARGV[5] free sequences  ARGV[6] most sequences that one job is counted for
-- ARGV[7] 1 if the engine is empty
-- ARGV[8] lease in milliseconds  ARGV[9] cost of a prompt token
-- ARGV[10] most prompt tokens of all claimed jobs, if there are several
-- ARGV[11] KV-cache tokens and ARGV[12] sequences for requests only: those of batch jobs that
-- requests may replace, and sequences that batch jobs leave free
-- ARGV[13] prompt tokens of batch jobs after which no more of them are claimed
-- ARGV[14] queue prefix and ARGV[15] pace prefix of requests  ARGV[16..17] the same of batch jobs
-- ARGV[18] prefix of what workers hold  ARGV[19] prefix of the workers' own doorbells
-- ARGV[20] most milliseconds from when a job is first passed over or kept; 0: no affinity
-- ARGV[21] microseconds in which this worker processes a prompt token; 0: keep no job
-- ARGV[22] quantum, in service units
-- ARGV[23] name of the engine, for receipts
-- ARGV[24] free slots for adapters; -1: the worker has none
-- ARGV[25..] digests of the adapters that have a slot
-- Output {blocked, claimed requests, milliseconds until a kept job may be claimed, jobs first passed
-- over by this call, jobs kept by this call, 1 if a job waits for a slot, else 0, milliseconds that
-- claimed jobs waited because of affinity, id, attempt, milliseconds that it waited, payload, ...}:
-- blocked is 1 if the next job does not fit and is a request, 2 if it is a batch job, else 0;
-- 0 milliseconds if no job is kept; requests come first; -1 milliseconds if the process that
-- enqueued the job records no arrivals
local leases, job_prefix, worker = KEYS[1], ARGV[1], ARGV[2]
local most_jobs, most_sequences = tonumber(ARGV[3]), tonumber(ARGV[6])
local room_tokens, room_sequences = ARGV[4] + ARGV[11], ARGV[5] + ARGV[12]
local empty, prompt_cost = ARGV[7] == '1', tonumber(ARGV[9])
local now = now_ms()
local expiry = now + ARGV[8]
local most_prompt_tokens, prompt_tokens = tonumber(ARGV[10]), 0
local out, taken = {0, 0, 0, 0, 0, 0, 0}, 0
local memory_seconds, pace_expiry_ms = 30, 600000

local function note_pace(key, number, has_more)
  local pace = call('HMGET', key, 'claims', 'squares', 'seconds', 'at')
  local claimed, squares, seconds = tonumber(pace[1] or '0'), tonumber(pace[2] or '0'),
    tonumber(pace[3] or '0')
  if pace[4] then
    local passed = math.max(now - pace[4], 0) / 1000
    local kept = math.exp(-passed / memory_seconds)
    claimed, squares = claimed * kept + number, squares * kept + passed ^ 2
    seconds = seconds * kept + passed
  elseif not has_more then
    return
  else
    local kept = 1 / math.max(seconds, 1)
    claimed, squares, seconds = claimed * kept, squares * kept, seconds * kept
  end
  call('HSET', key, 'claims', string.format('%.6f', claimed),
    'squares', string.format('%.9f', squares), 'seconds', string.format('%.6f', seconds),
    'at', string.format('%.0f', now))
  call('PEXPIRE', key, pace_expiry_ms)
  if not has_more then call('HDEL', key, 'at', 'given') end
end

local holders, held_prefix, doorbell_prefix = KEYS[18], ARGV[18], ARGV[19]
local patience, prefill_us, quantum = tonumber(ARGV[20]), tonumber(ARGV[21]), tonumber(ARGV[22])
-- One command for two keys that often are absent: published digests, and batch jobs.
local extras = call('EXISTS', holders, KEYS[10])
local uses_affinity = patience > 0 and extras > 0 and call('EXISTS', holders) == 1
local holds_any = uses_affinity and call('EXISTS', held_prefix .. worker) == 1
local most_candidates, most_kept_tenants, doorbell_expiry_ms = 16, 8, 10000
local engine = ARGV[23]
local free_slots, most_slotless_tenants, has_slot = tonumber(ARGV[24]), 100, {}
for i = 25, #ARGV do has_slot[ARGV[i]] = true end
local digest_bytes, record_bytes, adds = 8, 12, 2 ^ 31
local seen, keeps_jobs = {}, true

local function digests_of(affinity)
  local digests = {}
  for i = 1, #affinity, record_bytes do
    digests[#digests + 1] = string.sub(affinity, i, i + digest_bytes - 1)
  end
  return digests
end

-- Return the tokens of a record of `contract.affinity`, and whether they add to those of prefixes.
local function tokens_of(affinity, record)
  local tokens = struct.unpack('>I4', affinity, (record - 1) * record_bytes + digest_bytes + 1)
  if tokens >= adds then return tokens - adds, true end
  return tokens, false
end

-- Note what of a job the worker holds: prompt tokens in its cache, and their sum with other tokens.
local function match(job)
  if not holds_any then return end
  job.is_held = call('SMISMEMBER', held_prefix .. worker, unpack(job.digests))
  job.is_complete = job.is_held[1] == 1
  for record = #job.digests, 1, -1 do
    if job.is_held[record] == 1 then
      local tokens, is_added = tokens_of(job.affinity, record)
      if is_added then job.score = job.score + tokens else job.cached = tokens end
    else
      local _, is_added = tokens_of(job.affinity, record)
      if is_added then job.is_complete = false end
    end
  end
  job.score = job.score + job.cached
end

-- Read of a waiting job what decides about its order, once in this call.
local function look_at(id)
  local job = seen[id]
  if job then return job end
  local fields = call('HMGET', job_prefix .. id, 'need_tokens', 'sequences', 'affinity',
    'passed_at', 'kept_for', 'kept_until')
  job = {key = job_prefix .. id, exists = fields[1], score = 0, cached = 0, passed_at = fields[4],
    kept_for = fields[5], kept_until = fields[6] and tonumber(fields[6])}
  seen[id] = job
  if not job.exists then return job end
  job.tokens, job.sequences = tonumber(fields[1]), math.min(tonumber(fields[2]), most_sequences)
  job.is_due = job.passed_at and now - job.passed_at >= patience
  if fields[3] then
    job.affinity, job.digests = fields[3], digests_of(fields[3])
    match(job)
  end
  return job
end

local function fits(job)
  return job.tokens <= room_tokens and job.sequences <= room_sequences
end

local function note_passed(job)
  if job.passed_at then return false end
  job.passed_at = now
  call('HSET', job.key, 'passed_at', now)
  return true
end

-- Keep a job for a worker that holds more of it, if that is worth a millisecond. A job is kept once.
local function keep(job)
  local may_wait = keeps_jobs and prefill_us > 0 and job.digests
  if not may_wait or job.is_complete or job.is_due or job.kept_until then return false end
  local patience_left = job.passed_at and patience - (now - job.passed_at) or patience
  for record, holder in ipairs(call('HMGET', holders, unpack(job.digests))) do
    local digest, tokens, is_added = job.digests[record], tokens_of(job.affinity, record)
    local is_held = job.is_held and job.is_held[record] == 1
    local gain = is_held and 0 or is_added and tokens or tokens - job.cached
    local wait = math.min(math.floor(gain * prefill_us / 1000), patience_left)
    if holder and holder ~= worker and wait >= 1 then
      if call('SISMEMBER', held_prefix .. holder, digest) == 1 then
        job.kept_for, job.kept_until = holder, now + wait
        call('HSET', job.key, 'kept_for', holder, 'kept_until', job.kept_until)
        note_passed(job)
        out[5] = out[5] + 1
        local doorbell = doorbell_prefix .. holder
        if call('LLEN', doorbell) == 0 then
          call('RPUSH', doorbell, 1)
          call('PEXPIRE', doorbell, doorbell_expiry_ms)
        end
        return true
      end
      call('HDEL', holders, digest)
    end
  end
  return false
end

local function is_kept(job)
  if not keeps_jobs or not job.kept_until or job.kept_for == worker or now >= job.kept_until then
    return false
  end
  local wait = job.kept_until - now
  if out[3] == 0 or wait < out[3] then out[3] = wait end
  return true
end

-- Choose the next job of a tenant's queue. Return its id, its place, whether the queue has no other
-- job, and its prompt tokens in the worker's cache; nil, nil and false if all candidates are kept.
local function choose(queue, may_keep)
  local entries = call('ZRANGE', queue, 0, 1, 'WITHSCORES')
  local first, is_last = entries[1] and uses_affinity and look_at(entries[1]), not entries[3]
  if not first or not first.affinity or first.is_due or first.is_complete and not is_kept(first) then
    return entries[1], tonumber(entries[2]), is_last, first and first.cached or 0
  end
  if not is_last then
    entries = call('ZRANGE', queue, 0, most_candidates - 1, 'WITHSCORES')
  end
  -- Candidates have the first one's tier, and have started before like it, or not. A job that has
  -- started is not kept.
  local class = math.floor(entries[2] / begun_span)
  may_keep = may_keep and class % 2 == 1
  repeat
    local best, at
    for i = 1, #entries, 2 do
      if math.floor(entries[i + 1] / begun_span) ~= class then break end
      local job = look_at(entries[i])
      if not job.exists or job.is_due then
        best, at = job, i
        break
      end
      if not is_kept(job) then
        if not best then
          best, at = job, i
          if not holds_any then break end
        elseif job.score > best.score and fits(job) then
          best, at = job, i
        end
      end
    end
    if not best then return nil, nil, false end
    if not best.exists or not may_keep or not keep(best) then
      for i = 1, best.exists and at - 1 or 0, 2 do
        if note_passed(look_at(entries[i])) then out[4] = out[4] + 1 end
      end
      return entries[at], tonumber(entries[at + 1]), is_last, best.cached
    end
  until false
end

-- Claim from the lane whose keys follow KEYS[lane]. Return whether jobs are left in it.
local function claim_from(lane, queue_prefix, pace_prefix, prompt_room, blocked)
  local active, counters, last = KEYS[lane], KEYS[lane + 1], KEYS[lane + 2]
  local waiting, doorbell, sheddable = KEYS[lane + 3], KEYS[lane + 4], KEYS[lane + 5]
  local pace, arrivals = KEYS[lane + 6], KEYS[lane + 7]
  local claims, visits, taken_before, has_more = {}, 0, taken, nil
  local leased, removed, places, changed = {}, {}, {}, {}

  -- Return whether a job with this adapter has a slot, or gets one.
  local function take_slot(adapter)
    if out[6] == 1 or free_slots < 0 then return false end
    if not has_slot[adapter] then
      if free_slots == 0 then return false end
      free_slots, has_slot[adapter] = free_slots - 1, true
    end
    return true
  end

  -- Lease a job of which the worker's cache has these tokens. Return false if claiming stops, nil if
  -- the job waits for a slot.
  local function lease(id, tenant, cached, is_last)
    local key = job_prefix .. id
    -- A job without a hash has expired: its id is dropped without a charge.
    local job = call('HMGET', key, 'need_tokens', 'sequences', 'prompt_tokens', 'weight',
      'payload', 'reported', 'adapter')
    if not job[1] then return true end
    local tokens, sequences = tonumber(job[1]), math.min(tonumber(job[2]), most_sequences)
    local fits = tokens <= room_tokens and sequences <= room_sequences
    -- An empty engine accepts any job. Otherwise a job that needs more than the pool would block
    -- all tenants forever.
    if prompt_room <= 0 or not fits and not (empty and taken == 0) then
      out[1] = blocked
      return false
    end
    if taken > 0 and prompt_tokens + job[3] > most_prompt_tokens then return false end
    if job[7] and not take_slot(job[7]) then
      out[6] = 1
      return nil
    end
    prompt_room = prompt_room - job[3]
    room_tokens, room_sequences = room_tokens - tokens, room_sequences - sequences
    local attempt = call('HINCRBY', key, 'attempt', 1)
    if attempt == 1 then
      local uncached = job[3] - cached
      call('HSET', key, 'worker', worker, 'engine', engine, 'uncached', uncached)
      charge(not is_last and active, counters, tenant, prompt_cost * uncached / job[4])
    else
      call('HSET', key, 'worker', worker, 'engine', engine)
    end
    if job[6] then call('HDEL', key, 'reported') end
    leased[#leased + 1] = expiry
    leased[#leased + 1] = id
    taken, prompt_tokens = taken + 1, prompt_tokens + job[3]
    claims[tenant] = (claims[tenant] or 0) + 1
    local passed_at = seen[id] and seen[id].passed_at
    if passed_at then out[7] = out[7] + math.min(now - passed_at, patience) end
    out[#out + 1] = id
    out[#out + 1] = attempt
    out[#out + 1] = -1
    places[#removed + 1] = #out
    out[#out + 1] = job[5]
    return true
  end

  -- The tenants before this index have only kept jobs, or wait for a slot. Others overtake those with
  -- kept jobs up to the ceiling.
  local index, kept, slotless, ceiling, only_kept = 0, 0, 0, math.huge, false
  while taken < most_jobs and visits < 1000 do
    visits = visits + 1
    local nearest = call('ZRANGE', active, index, index + 1, 'WITHSCORES')
    local tenant, counter, is_only = nearest[1], nearest[2], index == 0 and not nearest[3]
    if not tenant or slotless == most_slotless_tenants then
      has_more, only_kept = index > 0, index > 0 and slotless == 0
      break
    end
    if keeps_jobs and (tonumber(counter) > ceiling or kept == most_kept_tenants) then
      index, kept, slotless, keeps_jobs, out[3] = 0, 0, 0, false, 0
      tenant, is_only = call('ZRANGE', active, 0, 0)[1], false
    end
    local queue = queue_prefix .. tenant
    local id, place, is_last, cached = choose(queue, lane == 2)
    local is_leased = id and lease(id, tenant, cached, is_last)
    if not id and not is_last then
      if kept == 0 then ceiling = counter + quantum end
      index, kept = index + 1, kept + 1
    elseif id and is_leased == nil then
      index, slotless = index + 1, slotless + 1
    else
      if id then
        if not is_leased then break end
        call('ZREM', queue, id)
        removed[#removed + 1] = id
        local rank = math.floor(place / tier_span)
        local fresh = rank .. ' ' .. tenant
        if is_last then call('ZREM', sheddable, fresh) end
        changed[fresh] = not is_last and {queue, tenant, rank} or nil
      end
      has_more = true
      if is_last then
        call('ZREM', active, tenant)
        call('SET', last, tenant)
        note_pace(pace_prefix .. tenant, claims[tenant] or 0, false)
        claims[tenant] = nil
        if is_only then
          has_more = false
          break
        end
      end
    end
  end

  if #leased > 0 then call('ZADD', leases, unpack(leased)) end
  if #removed > 0 then
    for i, arrived in ipairs(call('ZMSCORE', arrivals, unpack(removed))) do
      if arrived and places[i] then out[places[i]] = math.max(now - arrived, 0) end
    end
    call('ZREM', arrivals, unpack(removed))
    call('DECRBY', waiting, #removed)
    for _, each in pairs(changed) do recount(sheddable, unpack(each)) end
  end
  for tenant, number in pairs(claims) do note_pace(pace_prefix .. tenant, number, true) end
  if has_more == nil then has_more = call('ZCARD', active) > 0 end
  local is_backlog = has_more and not only_kept
  if taken > taken_before or not is_backlog then
    note_pace(pace, taken - taken_before, is_backlog)
  end

  -- If jobs remain, wake the next worker; else remove the wake-up tokens. This worker claims again
  -- when a kept job is free. If it may then be full, because it has claimed others, so does the next.
  if not is_backlog then call('DEL', doorbell) end
  if is_backlog or only_kept and taken > taken_before then
    if call('LLEN', doorbell) == 0 then call('RPUSH', doorbell, 1) end
  end
  return has_more
end

local has_more = claim_from(2, ARGV[14], ARGV[15], math.huge, 1)
out[2] = taken
if not has_more and extras > 0 and call('EXISTS', KEYS[10]) == 1 then
  room_tokens, room_sequences = room_tokens - ARGV[11], room_sequences - ARGV[12]
  empty = empty and ARGV[11] == '0'
  claim_from(10, ARGV[16], ARGV[17], tonumber(ARGV[13]), 2)
end
return out

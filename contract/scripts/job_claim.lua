-- Lease waiting jobs to a worker in fair order, as long as its engine has room.
--
-- The tenant with the lowest counter goes first, and is charged for the prompt of the first job in
-- its queue. If that job does not fit, claiming stops: skipping to a smaller job of another tenant
-- would break the fairness bound.
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
-- ARGV[1] job prefix  ARGV[2] worker  ARGV[3] most jobs  ARGV[4] free KV-cache tokens
-- ARGV[5] free sequences  ARGV[6] most sequences that one job is counted for
-- ARGV[7] 1 if the engine is empty
-- ARGV[8] lease in milliseconds  ARGV[9] cost of a prompt token
-- ARGV[10] most prompt tokens of all claimed jobs, if there are several
-- ARGV[11] KV-cache tokens and ARGV[12] sequences for requests only: those of batch jobs that
-- requests may replace, and sequences that batch jobs leave free
-- ARGV[13] prompt tokens of batch jobs after which no more of them are claimed
-- ARGV[14] queue prefix and ARGV[15] pace prefix of requests  ARGV[16..17] the same of batch jobs
-- Output {blocked, claimed requests, id, attempt, milliseconds that it waited, payload, ...}:
-- blocked is 1 if the next job does not fit and is a request, 2 if it is a batch job, else 0;
-- requests come first; -1 milliseconds if the process that enqueued the job records no arrivals
local leases, job_prefix, worker = KEYS[1], ARGV[1], ARGV[2]
local most_jobs, most_sequences = tonumber(ARGV[3]), tonumber(ARGV[6])
local room_tokens, room_sequences = ARGV[4] + ARGV[11], ARGV[5] + ARGV[12]
local empty, prompt_cost = ARGV[7] == '1', tonumber(ARGV[9])
local now = now_ms()
local expiry = now + ARGV[8]
local most_prompt_tokens, prompt_tokens = tonumber(ARGV[10]), 0
local out, taken = {0, 0}, 0
local memory_seconds, pace_expiry_ms = 30, 600000

local function note_pace(key, number, has_more)
  local pace = redis.call('HMGET', key, 'claims', 'squares', 'seconds', 'at')
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
  redis.call('HSET', key, 'claims', string.format('%.6f', claimed),
    'squares', string.format('%.9f', squares), 'seconds', string.format('%.6f', seconds),
    'at', string.format('%.0f', now))
  redis.call('PEXPIRE', key, pace_expiry_ms)
  if not has_more then redis.call('HDEL', key, 'at', 'given') end
end

-- Claim from the lane whose keys follow KEYS[lane]. Return whether jobs are left in it.
local function claim_from(lane, queue_prefix, pace_prefix, prompt_room, blocked)
  local active, counters, last = KEYS[lane], KEYS[lane + 1], KEYS[lane + 2]
  local waiting, doorbell, sheddable = KEYS[lane + 3], KEYS[lane + 4], KEYS[lane + 5]
  local pace, arrivals = KEYS[lane + 6], KEYS[lane + 7]
  local claims, visits, taken_before, has_more = {}, 0, taken, true
  while taken < most_jobs and visits < 1000 do
    visits = visits + 1
    local tenant = redis.call('ZRANGE', active, 0, 0)[1]
    if not tenant then
      has_more = false
      break
    end
    local queue = queue_prefix .. tenant
    local first = redis.call('ZRANGE', queue, 0, 1, 'WITHSCORES')
    local id, place, is_last = first[1], tonumber(first[2]), not first[3]
    local key = job_prefix .. (id or '')
    -- A job without a hash has expired: its id is dropped without a charge.
    local job = redis.call('HMGET', key, 'need_tokens', 'sequences', 'prompt_tokens', 'weight',
      'payload', 'reported')
    if job[1] then
      local tokens, sequences = tonumber(job[1]), math.min(tonumber(job[2]), most_sequences)
      local fits = tokens <= room_tokens and sequences <= room_sequences
      -- An empty engine accepts any job. Otherwise a job that needs more than the pool would block
      -- all tenants forever.
      if prompt_room <= 0 or not fits and not (empty and taken == 0) then
        out[1] = blocked
        break
      end
      if taken > 0 and prompt_tokens + job[3] > most_prompt_tokens then break end
      prompt_room = prompt_room - job[3]
      room_tokens, room_sequences = room_tokens - tokens, room_sequences - sequences
      local attempt = redis.call('HINCRBY', key, 'attempt', 1)
      redis.call('HSET', key, 'worker', worker)
      if job[6] then redis.call('HDEL', key, 'reported') end
      redis.call('ZADD', leases, expiry, id)
      if attempt == 1 then charge(active, counters, tenant, prompt_cost * job[3] / job[4]) end
      taken, prompt_tokens = taken + 1, prompt_tokens + job[3]
      claims[tenant] = (claims[tenant] or 0) + 1
      out[#out + 1] = id
      local arrived = redis.call('ZSCORE', arrivals, id)
      out[#out + 1] = attempt
      out[#out + 1] = arrived and math.max(now - arrived, 0) or -1
      out[#out + 1] = job[5]
    end
    if id then
      redis.call('ZREM', queue, id)
      redis.call('ZREM', arrivals, id)
      redis.call('DECR', waiting)
      local rank = math.floor(place / tier_span)
      if is_last then
        redis.call('ZREM', sheddable, rank .. ' ' .. tenant)
      else
        recount(sheddable, queue, tenant, rank)
      end
    end
    if is_last then
      redis.call('ZREM', active, tenant)
      redis.call('SET', last, tenant)
      note_pace(pace_prefix .. tenant, claims[tenant] or 0, false)
      claims[tenant] = nil
    end
  end

  for tenant, number in pairs(claims) do note_pace(pace_prefix .. tenant, number, true) end
  has_more = has_more and redis.call('ZCARD', active) > 0
  if taken > taken_before or not has_more then note_pace(pace, taken - taken_before, has_more) end

  -- If jobs remain, wake the next worker; if this call took the last one, remove the wake-up tokens.
  if not has_more then
    redis.call('DEL', doorbell)
  elseif redis.call('LLEN', doorbell) == 0 then
    redis.call('RPUSH', doorbell, 1)
  end
  return has_more
end

local has_more = claim_from(2, ARGV[14], ARGV[15], math.huge, 1)
out[2] = taken
if not has_more and redis.call('EXISTS', KEYS[10]) == 1 then
  room_tokens, room_sequences = room_tokens - ARGV[11], room_sequences - ARGV[12]
  empty = empty and ARGV[11] == '0'
  claim_from(10, ARGV[16], ARGV[17], tonumber(ARGV[13]), 2)
end
return out

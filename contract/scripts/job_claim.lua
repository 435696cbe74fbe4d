-- Lease waiting jobs to a worker in fair order, as long as its engine has room.
--
-- The tenant with the lowest counter goes first, and is charged for the prompt of the first job in
-- its queue. If that job does not fit, claiming stops: skipping to a smaller job of another tenant
-- would break the fairness bound.
--
-- The pace of claims is measured while jobs wait: claims, seconds, and squares of the seconds
-- between two calls. All three decay exponentially. When a new backlog starts, they are scaled down
-- to one second of measurement (see job_enqueue).
--
-- KEYS[1] active tenants  KEYS[2] service counters  KEYS[3] last active  KEYS[4] leases
-- KEYS[5] waiting  KEYS[6] doorbell
-- KEYS[7] sheddable  KEYS[8] the model's pace  KEYS[9] arrivals
-- ARGV[1] queue prefix  ARGV[2] job prefix  ARGV[3] worker  ARGV[4] most jobs
-- ARGV[5] free KV-cache tokens
-- ARGV[6] free sequences  ARGV[7] most sequences that one job is counted for
-- ARGV[8] 1 if the engine is empty
-- ARGV[9] lease in milliseconds  ARGV[10] cost of a prompt token  ARGV[11] pace prefix
-- ARGV[12] most prompt tokens of all claimed jobs, if there are several
-- Output {blocked, id, attempt, milliseconds that it waited, payload, ...}: blocked is 1 if the
-- next job does not fit, else 0; -1 milliseconds if the process that enqueued the job records no
-- arrivals
local active, counters, last = KEYS[1], KEYS[2], KEYS[3]
local leases, waiting, doorbell = KEYS[4], KEYS[5], KEYS[6]
local queue_prefix, job_prefix, worker = ARGV[1], ARGV[2], ARGV[3]
local room_tokens, room_sequences = tonumber(ARGV[5]), tonumber(ARGV[6])
local most_sequences = tonumber(ARGV[7])
local arrivals = KEYS[9]
local empty, prompt_cost = ARGV[8] == '1', tonumber(ARGV[10])
local now = now_ms()
local expiry = now + ARGV[9]
local out, taken, blocked = {0}, 0, 0
local claims = {}
local most_jobs, visits = tonumber(ARGV[4]), 0
local most_prompt_tokens, prompt_tokens = tonumber(ARGV[12]), 0
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

local has_more = true
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
    if not fits and not (empty and taken == 0) then
      blocked = 1
      break
    end
    if taken > 0 and prompt_tokens + job[3] > most_prompt_tokens then break end
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
      redis.call('ZREM', KEYS[7], rank .. ' ' .. tenant)
    else
      recount(KEYS[7], queue, tenant, rank)
    end
  end
  if is_last then
    redis.call('ZREM', active, tenant)
    redis.call('SET', last, tenant)
    note_pace(ARGV[11] .. tenant, claims[tenant] or 0, false)
    claims[tenant] = nil
  end
end

for tenant, number in pairs(claims) do note_pace(ARGV[11] .. tenant, number, true) end
has_more = has_more and redis.call('ZCARD', active) > 0
if taken > 0 or not has_more then note_pace(KEYS[8], taken, has_more) end

-- If jobs remain, wake the next worker; if this call took the last one, remove the wake-up tokens.
if not has_more then
  redis.call('DEL', doorbell)
elseif redis.call('LLEN', doorbell) == 0 then
  redis.call('RPUSH', doorbell, 1)
end
out[1] = blocked
return out

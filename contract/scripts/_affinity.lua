-- Affinity: the order of a tenant's jobs by what workers hold of them (see contract.affinity).
--
-- Among the oldest jobs of the tenant's first tier, the one that finds most in the worker's cache
-- goes first. If another worker holds more of it, the job is kept for that worker for as long as
-- this one would take to process the difference, once. A job that was first passed over or kept some
-- time ago goes before all others of its tenant.
--
-- `affinity` is the state of one claim:
--   worker, now, job_prefix, holders, held_prefix, doorbell_prefix, patience, prefill_us: see
--     job_claim
--   holds_any: whether the worker holds anything
--   keeps_jobs: whether jobs are still kept for others
--   seen: what was read of waiting jobs, by id
--   passed, kept: how many jobs this claim is the first to pass over, or keeps
--   kept_ms: milliseconds until the first of the kept jobs that it met may be claimed, or 0
-- @include places
-- @include room
-- @include held

local most_candidates, doorbell_expiry_ms = 16, 10000

-- Return how long a claimed job waited because of affinity.
local function delay_of(affinity, id)
  local job = affinity.seen[id]
  if not job or not job.passed_at then return 0 end
  return math.min(affinity.now - job.passed_at, affinity.patience)
end

local function is_kept(affinity, job)
  local ends = affinity.keeps_jobs and job.kept_until
  if not ends or job.kept_for == affinity.worker or affinity.now >= ends then return false end
  local wait = ends - affinity.now
  if affinity.kept_ms == 0 or wait < affinity.kept_ms then affinity.kept_ms = wait end
  return true
end

-- Keep a job for a worker that holds more of it, if that is worth a millisecond. A job is kept once.
local function keep(affinity, job)
  local may_wait = affinity.keeps_jobs and affinity.prefill_us > 0 and job.digests
  if not may_wait or job.is_complete or job.is_due or job.kept_until then return false end
  local now, patience_left = affinity.now, affinity.patience
  if job.passed_at then patience_left = patience_left - (now - job.passed_at) end
  for number, holder in ipairs(call('HMGET', affinity.holders, unpack(job.digests))) do
    local tokens, is_added = tokens_of(job.records, number)
    local is_held = job.is_held and job.is_held[number] == 1
    local gain = is_held and 0 or is_added and tokens or tokens - job.cached
    local wait = math.min(math.floor(gain * affinity.prefill_us / 1000), patience_left)
    if holder and holder ~= affinity.worker and wait >= 1 then
      local digest = job.digests[number]
      if call('SISMEMBER', affinity.held_prefix .. holder, digest) == 1 then
        job.kept_for, job.kept_until = holder, now + wait
        call('HSET', job.key, 'kept_for', holder, 'kept_until', job.kept_until)
        note_passed(affinity, job)
        affinity.kept = affinity.kept + 1
        local doorbell = affinity.doorbell_prefix .. holder
        if call('LLEN', doorbell) == 0 then
          call('RPUSH', doorbell, 1)
          call('PEXPIRE', doorbell, doorbell_expiry_ms)
        end
        return true
      end
      call('HDEL', affinity.holders, digest)
    end
  end
  return false
end

-- Return the best of some candidates, and its index; nil if all are kept. They have the first one's
-- tier, and have started before like it, or not.
local function best_of(affinity, entries, room)
  local class = math.floor(entries[2] / begun_span)
  local best, at
  for i = 1, #entries, 2 do
    if math.floor(entries[i + 1] / begun_span) ~= class then break end
    local job = look_at(affinity, entries[i])
    if not job.exists or job.is_due then return job, i end
    if not is_kept(affinity, job) then
      if not best then
        best, at = job, i
        if not affinity.holds_any then break end
      elseif job.score > best.score and fits(room, job.tokens, job.sequences) then
        best, at = job, i
      end
    end
  end
  return best, at
end

-- Choose the next job of a tenant's queue, of which the first entries are given. Return its id, its
-- place, and its prompt tokens in the worker's cache; nil if all candidates are kept.
local function choose(affinity, queue, entries, room, may_keep)
  local first = look_at(affinity, entries[1])
  if not first.records or first.is_due or first.is_complete and not is_kept(affinity, first) then
    return entries[1], entries[2], first.cached
  end
  if entries[3] then entries = call('ZRANGE', queue, 0, most_candidates - 1, 'WITHSCORES') end
  -- A job that has started is not kept.
  may_keep = may_keep and math.floor(entries[2] / begun_span) % 2 == 1
  local best, at
  repeat
    best, at = best_of(affinity, entries, room)
    if not best then return nil end
  until not best.exists or not may_keep or not keep(affinity, best)
  for i = 1, best.exists and at - 1 or 0, 2 do
    if note_passed(affinity, look_at(affinity, entries[i])) then
      affinity.passed = affinity.passed + 1
    end
  end
  return entries[at], entries[at + 1], best.cached
end

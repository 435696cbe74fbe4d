-- Jobs that a worker leaves for others, for some time (see _affinity).
-- @include cached_digests
-- @include doorbell

local most_others = 64

-- Return how long a claimed job waited because of affinity.
local function delay_of(affinity, id)
  local job = affinity.seen[id]
  if not job or not job.passed_at then return 0 end
  local ends = math.max(job.passed_at + affinity.patience, job.kept_until or 0)
  return math.min(affinity.now, ends) - job.passed_at
end

-- Return whether another worker claims jobs. One that is gone or drains holds nothing, and is not
-- announced.
local function is_claiming(affinity, worker)
  if affinity.is_claiming[worker] == nil then
    affinity.is_claiming[worker] = call('EXISTS', affinity.held_prefix .. worker) == 1
      or tonumber(call('ZSCORE', affinity.workers, worker) or 0) > affinity.now
  end
  return affinity.is_claiming[worker]
end

-- Return a worker of an exactness class that claims jobs; nil if there is none.
local function worker_of(affinity, class)
  if affinity.of_class[class] == nil then
    affinity.of_class[class] = false
    for _, other in ipairs(call('ZRANGEBYSCORE', affinity.workers, affinity.now, '+inf', 'LIMIT', 0,
      most_others)) do
      if call('SISMEMBER', affinity.held_prefix .. other, class) == 1 then
        affinity.of_class[class] = other
        break
      end
    end
  end
  return affinity.of_class[class] or nil
end

-- Return whether a job is left for others: for one that holds more of it, or for a class.
local function is_kept(affinity, job)
  local ends = affinity.keeps_jobs and job.kept_until
  if not ends or job.kept_for == affinity.worker or affinity.now >= ends then return false end
  local is_wanted = not job.class and is_claiming(affinity, job.kept_for)
  if not (is_wanted or job.is_foreign and worker_of(affinity, job.class)) then return false end
  local wait = ends - affinity.now
  if affinity.kept_ms == 0 or wait < affinity.kept_ms then affinity.kept_ms = wait end
  if is_wanted then
    affinity.moved = math.max(affinity.moved, (job.prompt_tokens - job.cached) / job.weight)
  end
  return true
end

local function is_due(affinity, job)
  local passed_at = job.passed_at
  return passed_at and affinity.now - passed_at >= affinity.patience and not is_kept(affinity, job)
end

-- Keep a job for another worker for some milliseconds, and wake that worker.
local function note_kept(affinity, job, other, wait)
  job.kept_for, job.kept_until = other, affinity.now + wait
  call('HSET', job.key, 'kept_for', other, 'kept_until', job.kept_until)
  note_passed(affinity, job)
  affinity.kept = affinity.kept + 1
  ring_own(affinity.doorbell_prefix .. other)
end

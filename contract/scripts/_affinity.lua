-- Affinity: the order of a tenant's jobs by what workers hold of them (see contract.affinity).
--
-- Among the oldest jobs of the tenant's first tier, the one that finds most in the worker's cache
-- goes first. If another worker holds more of it, the job is kept for that worker, once, for twice
-- as long as this one would take to process the difference: it would also evict as much, which may
-- be processed again. Half of these jobs may be kept: the others do not wait for them. A job that
-- was first passed over some time ago goes before all others of its tenant, unless it is kept.
--
-- The server of a job's session (see _sessions) counts as if it held the whole prompt. A client can
-- pretend that, and two workers may have served most of it. So the job is kept no longer than it may
-- be passed over, unless the server holds its longest prefix, and this worker less than half of it.
--
-- A job that has started is not kept for a prefix, unless its worker returned it, as it does to make
-- room: that worker still holds all of it. If this worker has another exactness class than the one
-- that generated the job's last token, the job is kept, once, for any worker of that class that
-- claims jobs, for the time for which a job may be passed over.
--
-- `affinity` is the state of one claim:
--   worker, now, job_prefix, holders, held_prefix, doorbell_prefix, workers, patience, longest_keep,
--     prefill_us, hinted, session_prefix: see job_claim
--   holds_any: whether the worker holds anything, or a session is known
--   keeps_jobs: whether jobs are still kept for others
--   seen, is_claiming, of_class: what was read of waiting jobs, by id, of other workers, by name, and
--     of classes
--   passed, kept: how many jobs this claim is the first to pass over, or keeps
--   kept_ms: milliseconds until the first of the kept jobs that it met may be claimed, or 0
--   moved: uncached tokens, by weight, of the largest kept job that the last choice met
-- @include places
-- @include room
-- @include reserved_jobs

local most_candidates, most_kept_jobs, begun_tenant = 16, 8, 0.25

-- Return for how long a job may wait, in milliseconds up to a limit, so that this worker neither
-- processes nor evicts so many tokens.
local function wait_for(affinity, tokens, limit)
  return math.min(math.floor(2 * tokens * affinity.prefill_us / 1000), limit)
end

-- Return the worker that holds most of a job, and how long the job may wait for it; nil if that is
-- less than a millisecond.
local function holder_of_most(affinity, job, limit)
  if not job.digests[1] then return nil, 0 end
  for number, holder in ipairs(call('HMGET', affinity.holders, unpack(job.digests))) do
    local tokens, is_added = tokens_of(job.records, number)
    local is_held = job.is_held and job.is_held[number] == 1
    local gain = is_held and 0 or is_added and tokens or tokens - job.cached
    local wait = wait_for(affinity, gain, limit)
    if holder and holder ~= affinity.worker and wait >= 1 then
      local digest = job.digests[number]
      if call('SISMEMBER', affinity.held_prefix .. holder, digest) == 1 then return holder, wait end
      call('HDEL', affinity.holders, digest)
    end
  end
  return nil, 0
end

-- Keep a job that has started for the class that generated its last token. A job is kept once.
local function keep_begun(affinity, job)
  if not (affinity.keeps_jobs and job.is_foreign) or job.kept_until or is_due(affinity, job) then
    return false
  end
  local other = worker_of(affinity, job.class)
  if other then note_kept(affinity, job, other, affinity.patience) end
  return other
end

-- Keep a job for a worker that holds more of it, if that is worth a millisecond. A job is kept once.
local function keep(affinity, job)
  local may_wait = affinity.keeps_jobs and affinity.prefill_us > 0 and job.records
  if not may_wait or job.is_complete or job.kept_until or is_due(affinity, job) then return false end
  local now, server = affinity.now, job.server
  local passed_ms = job.passed_at and now - job.passed_at or 0
  local holder, wait = holder_of_most(affinity, job, affinity.longest_keep - passed_ms)
  if server and is_claiming(affinity, server) then
    local _, is_added = tokens_of(job.records, 1)
    local is_certain = not is_added and job.digests[1] and job.cached * 2 <= job.prompt_tokens
      and call('SISMEMBER', affinity.held_prefix .. server, job.digests[1]) == 1
    local saved = wait_for(affinity, job.prompt_tokens - job.cached,
      (is_certain and affinity.longest_keep or affinity.patience) - passed_ms)
    if saved > wait then holder, wait = server, saved end
  end
  if wait < 1 then return false end
  note_kept(affinity, job, holder, wait)
  return true
end

-- Return the best of some candidates, its index, and how many were kept, by any worker; nil if all
-- are. They have the first one's tier, and have started before like it, or not.
local function best_of(affinity, entries, room)
  local class = math.floor(entries[2] / begun_span)
  local best, at, kept = nil, nil, 0
  for i = 1, #entries, 2 do
    if math.floor(entries[i + 1] / begun_span) ~= class then break end
    local job = look_at(affinity, entries[i])
    if job.kept_until and affinity.now < job.kept_until then kept = kept + 1 end
    if not job.exists or is_due(affinity, job) then return job, i, kept end
    if not is_kept(affinity, job) then
      if not best then
        best, at = job, i
        if not affinity.holds_any then break end
      elseif job.score > best.score and fits(room, job.tokens, job.sequences) then
        best, at = job, i
      end
    end
  end
  return best, at, kept
end

-- Choose the next job of a tenant's queue, of which the first entries are given. Return its id, its
-- place, and its prompt tokens in the worker's cache; nil if all candidates are kept, and for how many
-- tenants with kept jobs this one counts.
local function choose(affinity, queue, entries, room, may_keep)
  local first = look_at(affinity, entries[1], true)
  affinity.moved = 0
  if not first.records or is_due(affinity, first)
    or first.is_complete and not is_kept(affinity, first) then
    return entries[1], entries[2], first.cached
  end
  if entries[3] then entries = call('ZRANGE', queue, 0, most_candidates - 1, 'WITHSCORES') end
  local has_begun = math.floor(entries[2] / begun_span) % 2 == 0
  local best, at, kept
  repeat
    best, at, kept = best_of(affinity, entries, room)
    if not best then return nil, has_begun and begun_tenant or 1 end
  until not (best.exists and (has_begun and keep_begun(affinity, best)
    or (best.is_returned or not has_begun) and may_keep and kept < most_kept_jobs
      and keep(affinity, best)))
  for i = 1, best.exists and at - 1 or 0, 2 do
    if note_passed(affinity, look_at(affinity, entries[i])) then
      affinity.passed = affinity.passed + 1
    end
  end
  return entries[at], entries[at + 1], best.cached
end

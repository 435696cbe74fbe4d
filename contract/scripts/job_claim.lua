-- Lease waiting jobs to a worker in fair order, as long as its engine has room.
--
-- The tenant with the lowest counter goes first, with its oldest job, and is charged for the prompt
-- tokens that the worker does not hold. If that job does not fit, claiming stops.
--
-- Affinity changes this order within bounds (see _affinity). While all candidates of a tenant are
-- kept for others, later tenants go first up to what this worker would charge it, at least a quantum,
-- beyond its counter. Then no job is kept: a worker is idle for kept ones only if nobody else waits.
--
-- If the next job of a tenant needs a slot for its adapter and none is free, later tenants go first,
-- but none of their jobs with an adapter: a running one then leaves a slot for it, or the worker frees
-- one. A worker without adapters leaves these to others. A tenant at its share waits (see _shares).
-- Batch jobs are claimed only when no request waits but kept ones, in the same order by counters of
-- their own. The room of running batch jobs counts as free for requests: the worker gives them back.
--
-- KEYS leases, holders, workers: those that claim jobs  hinted: exists if a session is known; nine of
--   each lane (see _lanes): of requests, and of batch jobs
-- ARGV tokens, sequences: free KV-cache tokens and sequences of the engine
--   most_sequences: that one job is counted for  is_empty: 1 if the engine is empty
--   preemptible_tokens, preemptible_sequences: more for requests: of batch jobs, or left free by them
--   most_prompt_tokens, batch_prompt_tokens: at which claiming ends, of all jobs and of batch jobs
--   held_prefix, use_prefix, doorbell_prefix: of what workers hold, of uses, and of own doorbells
--   session_prefix: of the tenants' sessions  quantum: in service units  engine: for receipts
--   patience, longest_keep: milliseconds from when a job is first passed over, or kept; 0: no affinity
--   only: claim jobs of this tenant, up to a quantum beyond the lowest counter; empty: of all
--   use: of the engine by tenants, to publish; empty: nothing  cost: of making room, in tokens
--   prefill_us: microseconds in which this worker processes a prompt token; 0: keep no job
--   engine_tokens, engine_sequences: of the whole engine  uses, rights: see _shares, _next_jobs; JSON or empty
--   free_slots: for adapters; -1: the worker has none; then the digests of adapters with a slot
-- Output {blocked, claimed requests, milliseconds until a kept job may be claimed, jobs first passed
-- over by this call, jobs kept by this call, 1 if a job waits for a slot, else 0, milliseconds that
-- claimed jobs waited because of affinity, next jobs that lack a slot or room, uses of other engines if
-- there is none or `use` is given, lanes that wait for shares, id, attempt, milliseconds that it
-- waited, payload, weight, ...}: blocked is 1 if the next job does not fit and is a request, 2 if it
-- is a batch job; lanes are sums of these; 0 milliseconds: none is kept; requests first; -1 unknown
-- @include lanes
-- @include leases
-- @include affinity
local leases, holders, workers, hinted = unpack(KEYS, 1, 4)
local job_prefix, worker, engine, most_jobs, lease_ms, prompt_cost, tokens, sequences,
  most_sequences, is_empty, most_prompt_tokens, preemptible_tokens, preemptible_sequences, batch_prompt_tokens,
  queue_prefix, pace_prefix, batch_queue_prefix, batch_pace_prefix, held_prefix, doorbell_prefix,
  session_prefix, patience, longest_keep, prefill_us, quantum, only, use_prefix, use, cost,
  free_slots, engine_tokens, engine_sequences, uses, rights = unpack(ARGV, 1, 34)
local first_lane, lane_keys, first_adapter = 5, 9, 35
local most_visits, most_kept_tenants, most_slotless_tenants = 1000, 8, 100
local now, blocked, delay_ms, affinity, out = now_ms(), 0, 0, nil, {0, 0, 0, 0, 0, 0, 0, {}, {}, 0}

local room = {
  jobs = 0, most_jobs = tonumber(most_jobs), is_empty = is_empty == '1',
  tokens = tokens + preemptible_tokens, sequences = sequences + preemptible_sequences,
  most_sequences = tonumber(most_sequences), prompt_tokens = tonumber(most_prompt_tokens),
  lane_prompt_tokens = math.huge, free_slots = tonumber(free_slots), has_slot = {}, rights = decode(rights),
  engine_tokens = engine_tokens, engine_sequences = engine_sequences, uses = decode(uses)
}
for i = first_adapter, #ARGV do room.has_slot[ARGV[i]] = true end

local claim = {
  leases = leases, job_prefix = job_prefix, worker = worker, engine = engine, hinted = hinted,
  session_prefix = session_prefix, now = now, expiry = string.format('%.0f', now + lease_ms),
  prompt_cost = prompt_cost, room = room, seen = {}, has_affinity = tonumber(patience) > 0, out = out
}

-- One command for keys that often are absent: published digests, sessions, and batch jobs.
local batch_active = KEYS[first_lane + lane_keys]
local has_extras = call('EXISTS', holders, hinted, batch_active) > 0
if claim.has_affinity and has_extras and call('EXISTS', holders, hinted) > 0 then
  affinity = {
    worker = worker, now = now, job_prefix = job_prefix, holders = holders, workers = workers,
    held_prefix = held_prefix, doorbell_prefix = doorbell_prefix, session_prefix = session_prefix,
    patience = tonumber(patience), longest_keep = tonumber(longest_keep), seen = claim.seen,
    prefill_us = tonumber(prefill_us), keeps_jobs = true, is_claiming = {}, of_class = {},
    holds_any = call('EXISTS', held_prefix .. worker, hinted) > 0, passed = 0, kept = 0, kept_ms = 0
  }
end

-- Claim from a lane. Return whether jobs are left in it, and whether these all are kept or wait for
-- shares. `code` means that the engine has no room for its next job.
local function claim_from(lane, code, may_keep)
  -- Tenants before the index wait for slots, shares or kept jobs: others overtake up to the ceiling.
  local index, kept, slotless, ceiling, visits = 0, 0, 0, math.huge, 0
  local lowest, tenant, counter, other, is_only
  if only ~= '' then index = call('ZRANK', lane.active, only) or 0 end
  while room.jobs < room.most_jobs and visits < most_visits do
    visits = visits + 1
    if index > 0 or not is_only then
      tenant, counter, other = unpack(call('ZRANGE', lane.active, index, index + 1, 'WITHSCORES'))
    end
    is_only = index == 0 and not other
    if not tenant or slotless == most_slotless_tenants then
      return index > 0, index > 0 and slotless == 0
    end
    if index == 0 then lowest = counter end
    if only ~= '' then lowest = call('ZRANGE', lane.active, 0, 0, 'WITHSCORES')[2] end
    if only ~= '' and (tenant ~= only or counter - lowest > tonumber(quantum)) then
      return true, false
    end
    if kept > 0 and (tonumber(counter) > ceiling or kept >= most_kept_tenants) then
      index, kept, slotless, affinity.keeps_jobs, affinity.kept_ms = 0, 0, 0, false, 0
      claim.out[8] = {}
      tenant, counter = unpack(call('ZRANGE', lane.active, 0, 0, 'WITHSCORES'))
    end
    local queue = lane.queue .. tenant
    local entries, lacks = call('ZRANGE', queue, '0', '1', 'WITHSCORES'), nil
    if is_only and not affinity then entries, lacks = lease_ahead(claim, lane, tenant, entries) end
    local id, place, cached, is_last = entries[1], entries[2], 0, not entries[3]
    if affinity and id then id, place, cached = choose(affinity, queue, entries, room, may_keep) end
    if id and not lacks then lacks = lease(claim, lane, tenant, id, cached, is_last, is_only) end
    if entries[1] and not id then
      ceiling = math.min(ceiling, counter + math.max(quantum, prompt_cost * affinity.moved))
      index, kept = index + 1, kept + place
    elseif lacks == 'slots' then
      if code == 1 and counter - lowest <= tonumber(quantum) then
        add_next_job(claim.out[8], lane, tenant, job_prefix, room)
      end
      index, slotless = index + 1, slotless + 1
    elseif lacks == 'share' then
      index, lane.capped[tenant] = index + 1, tonumber(counter)
    elseif lacks then
      lane.reached = tonumber(counter)
      if lacks == 'room' then blocked = code end
      if blocked == 1 then
        add_next_jobs(claim.out[8], lane, index, math.min(counter + quantum, ceiling), job_prefix, room)
      end
      return true, false
    else
      if id then
        lane.reached, lane.capped[tenant] = tonumber(counter), nil
        remove(lane, tenant, queue, id, place, is_last)
        if affinity then delay_ms = delay_ms + delay_of(affinity, id) end
      end
      if is_last then end_waiting(claim, lane, tenant) end
      if is_last and is_only then return false, false end
    end
  end
  return visits > 0 or call('ZCARD', lane.active) > 0, false
end

-- Claim from the lane whose keys start at this key. Return whether jobs wait for room or slots.
local function claim_lane(k, queues, paces, code)
  local lane = begin_lane(lane_at(k, queues, paces))
  return end_lane(claim, lane, code, claim_from(lane, code, k == first_lane))
end

local is_backlog = claim_lane(first_lane, queue_prefix, pace_prefix, 1)
local claimed_requests = room.jobs
if not is_backlog and has_extras and call('EXISTS', batch_active) == 1 then
  only_for_batch(room, preemptible_tokens, preemptible_sequences, tonumber(batch_prompt_tokens))
  claim_lane(first_lane + lane_keys, batch_queue_prefix, batch_pace_prefix, 2)
end
out[1], out[2], out[6], out[7] = blocked, claimed_requests, room.waits_for_slot and 1 or 0, delay_ms
if affinity then out[3], out[4], out[5] = affinity.kept_ms, affinity.passed, affinity.kept end
await_tenants(blocked == 1, room, out[10], KEYS[first_lane + 8], doorbell_prefix .. worker, cost)
if blocked == 1 or use ~= '' then out[9] = exchange_uses(workers, use_prefix, worker, use, now) end
return out

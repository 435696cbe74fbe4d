-- What a claim changes: jobs are leased, and leave the queues of their tenants.
--
-- `claim` is the state of one claim, for all lanes: leases, job_prefix, worker, engine, now, expiry,
-- prompt_cost, room (see _room), has_affinity, hinted and session_prefix (see _sessions), `seen`, what
-- was read of waiting jobs by id (see _held), and the reply, `out`. The lane has what is written at
-- its end:
--   jobs: how many were leased, by tenant
--   leased: expiries and ids of leases
--   removed: the ids that left the queues; `waits` has the places of their waits in the reply
--   changed: tiers of tenants of which fewer jobs can be shed
--   capped: the counters of tenants that wait for their shares (see _shares)
--   reached: the counter of the tenant that was claimed from last, or waits for room
--   debtor, debt: the only tenant that waits, and what it is charged: once, since no order depends on
--     it before
-- @include places
-- @include counters
-- @include pace
-- @include room
-- @include next_jobs
-- @include cached_digests

local function begin_lane(lane)
  lane.jobs, lane.leased, lane.removed, lane.waits, lane.changed = {}, {}, {}, {}, {}
  lane.capped, lane.reached, lane.debtor, lane.debt = {}, 0, nil, 0
  return lane
end

-- Lease a job of a tenant, which is the only one that waits or not; `cached` of its prompt tokens are
-- in the worker's cache. Return what the engine lacks, if so.
local function lease(claim, lane, tenant, id, cached, is_last, is_only)
  local key, out, room = claim.job_prefix .. id, claim.out, claim.room
  local known = claim.seen[id]
  local payload, reported, adapter, share, attempt, need_tokens, sequences, prompt_tokens, weight,
    records = unpack(known and known.fields or call('HMGET', key, unpack(lease_fields, 1, 10)))
  -- A job without a hash has expired: its id is dropped without a charge.
  if not need_tokens then return nil end
  local lacks = take(room, tenant, tonumber(need_tokens), tonumber(sequences),
    tonumber(prompt_tokens), adapter, share)
  if lacks then return lacks end
  attempt = attempt + 1
  if attempt == 1 then
    -- Redis formats numbers more slowly than it copies texts.
    local uncached = cached == 0 and prompt_tokens or prompt_tokens - cached
    call('HSET', key, 'attempt', '1', 'worker', claim.worker, 'engine', claim.engine, 'uncached',
      uncached)
    local cost = claim.prompt_cost * uncached / weight
    if is_only then
      lane.debtor, lane.debt = tenant, lane.debt + cost
    else
      charge(not is_last and lane.active, lane.counters, tenant, cost)
    end
  else
    call('HSET', key, 'attempt', attempt, 'worker', claim.worker, 'engine', claim.engine)
  end
  if reported then call('HDEL', key, 'reported') end
  if claim.has_affinity then note_session(claim, tenant, records) end
  local leased, at = lane.leased, #out
  leased[#leased + 1], leased[#leased + 2] = claim.expiry, id
  lane.jobs[tenant] = (lane.jobs[tenant] or 0) + 1
  lane.waits[#lane.removed + 1] = at + 3
  out[at + 1], out[at + 2], out[at + 3], out[at + 4], out[at + 5] = id, attempt, -1, payload, weight
  return nil
end

-- Note that a job leaves the queue of its tenant.
local function note_removed(lane, tenant, queue, id, place, is_last)
  lane.removed[#lane.removed + 1] = id
  local rank = rank_of(place)
  local fresh = rank .. ' ' .. tenant
  if is_last then call('ZREM', lane.sheddable, fresh) end
  lane.changed[fresh] = not is_last and {queue, tenant, rank} or nil
end

-- Remove a job from the queue of its tenant.
local function remove(lane, tenant, queue, id, place, is_last)
  call('ZREM', queue, id)
  note_removed(lane, tenant, queue, id, place, is_last)
end

-- Lease jobs of the only tenant that waits in their order, but for the last one, with one read of its
-- queue. Return the entries of the next two, of which the first two of all are given, and what the
-- engine lacks for the first of them, if so.
local function lease_ahead(claim, lane, tenant, entries)
  local queue, most = lane.queue .. tenant, claim.room.most_jobs - claim.room.jobs
  local i, ids, lacks = 1, {}, nil
  if most == 1 or not entries[3] then return entries, nil end
  entries = call('ZRANGE', queue, 0, most, 'WITHSCORES')
  local last = 2 * math.min(#entries / 2, most) - 2
  while i < last do
    lacks = lease(claim, lane, tenant, entries[i], 0, false, true)
    if lacks then break end
    note_removed(lane, tenant, queue, entries[i], entries[i + 1], false)
    ids[#ids + 1], i = entries[i], i + 2
  end
  if i > 1 then call('ZREM', queue, unpack(ids)) end
  return {unpack(entries, i, i + 3)}, lacks
end

-- Remove a tenant without waiting jobs from the active tenants.
local function end_waiting(claim, lane, tenant)
  call('ZREM', lane.active, tenant)
  call('SET', lane.last, tenant)
  note_pace(lane.tenant_pace .. tenant, claim.now, lane.jobs[tenant] or 0, false)
  lane.jobs[tenant] = nil
end

-- Write what the claim has changed of a lane. `is_backlog`: jobs are left that are not kept.
local function write(claim, lane, is_backlog)
  local leased, removed, now = lane.leased, lane.removed, claim.now
  if #leased > 0 then call('ZADD', claim.leases, unpack(leased)) end
  if #removed > 0 then
    for i, arrived in ipairs(call('ZMSCORE', lane.arrivals, unpack(removed))) do
      if arrived and lane.waits[i] then claim.out[lane.waits[i]] = math.max(now - arrived, 0) end
    end
    call('ZREM', lane.arrivals, unpack(removed))
    call('DECRBY', lane.waiting, #removed)
    for _, each in pairs(lane.changed) do recount(lane.sheddable, unpack(each)) end
  end
  for tenant, number in pairs(lane.jobs) do
    note_pace(lane.tenant_pace .. tenant, now, number, true)
  end
  if #leased > 0 or not is_backlog then note_pace(lane.pace, now, #leased / 2, is_backlog) end
end

-- End the claim from a lane, in which jobs are left or not, that all may wait for another worker or
-- their shares, or not. Return whether jobs wait for room or slots.
local function end_lane(claim, lane, code, has_more, may_wait)
  if lane.debtor then charge(has_more and lane.active, lane.counters, lane.debtor, lane.debt) end
  local is_backlog, is_capped = has_more and not may_wait, may_wait and next(lane.capped)
  for tenant, counter in pairs(lane.capped) do
    if counter < lane.reached then
      charge(lane.active, lane.counters, tenant, lane.reached - counter)
    end
  end
  write(claim, lane, is_backlog)
  if is_capped then claim.out[10] = claim.out[10] + code end
  -- If jobs remain, wake the next worker; else remove the wake-up tokens. This worker claims again
  -- when a kept job is free. It may then be full, if it has claimed others, so wake the next.
  if not is_backlog and not is_capped then call('DEL', lane.doorbell) end
  if is_backlog or is_capped or may_wait and #lane.leased > 0 then ring(lane.doorbell) end
  return is_backlog
end

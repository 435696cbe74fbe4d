-- Functions that several scripts of the queue share. It is prepended to each script that names it
-- as its prelude.

-- Globals are slow to look up.
local call = redis.call

-- A place in a tenant's queue is `rank * tier_span`, plus `begun_span` if the job never started,
-- plus a sequence number. The spans are so large that sequence numbers never overlap; a double
-- represents every place exactly.
local tier_span, begun_span = 2 ^ 40, 2 ^ 39

-- Batch jobs, those of this rank, wait in a lane of their own. A script for jobs of any lane gets
-- the same keys of both: first those of requests, then those of batch jobs.
local batch_rank = 3
local function is_batch(place) return tonumber(place) >= batch_rank * tier_span end

-- Unix time in milliseconds by the server's clock.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Store how many of a tenant's waiting jobs of a tier never started: these can be shed.
local function recount(sheddable, queue, tenant, rank)
  local fresh = call('ZCOUNT', queue, rank * tier_span + begun_span,
    (rank + 1) * tier_span - 1)
  if fresh > 0 then
    call('ZADD', sheddable, rank * tier_span + fresh, rank .. ' ' .. tenant)
  else
    call('ZREM', sheddable, rank .. ' ' .. tenant)
  end
end

-- Add a tenant to the active tenants. Its counter is raised to the lowest of theirs, so that idle
-- time earns no credit (VTC, OSDI'24). If no tenant is active, it is raised to that of the tenant
-- that was active last.
local function begin_waiting(active, counters, last, tenant)
  local counter = call('HGET', counters, tenant)
  local lift = call('ZRANGE', active, 0, 0, 'WITHSCORES')[2]
  if not lift then
    local leaver = call('GET', last)
    lift = leaver and leaver ~= tenant and call('HGET', counters, leaver) or '0'
  end
  if not counter or tonumber(lift) > tonumber(counter) then
    counter = lift
    call('HSET', counters, tenant, counter)
  end
  call('ZADD', active, counter, tenant)
end

-- Charge a tenant for its service, whether it has waiting jobs or not. A caller that removes it from
-- the active tenants passes false for them.
local function charge(active, counters, tenant, cost)
  local score = call('HINCRBYFLOAT', counters, tenant, string.format('%.17g', cost))
  if active then call('ZADD', active, 'XX', score, tenant) end
end

-- Run a command on a key with any number of words, of which an even number fits into one call.
local function call_in_parts(command, key, words)
  for i = 1, #words, 1000 do call(command, key, unpack(words, i, math.min(i + 999, #words))) end
end

-- Return the prompt tokens to charge when a worker reports a job's prompt, of which `cached` were in
-- its cache: the claim has charged `uncached`, an estimate. It is nil after the first report.
local function uncharged_prompt(uncached, prompt, cached)
  if not uncached or tonumber(prompt) == 0 then return 0 end
  return prompt - cached - uncached
end

-- Add what a worker's report leaves to charge to `costs`, by lane and tenant. The lane is the place
-- of its active tenants in KEYS. The job is its worker, attempt, tenant, weight, charged completion
-- tokens, place and uncached prompt tokens. Return the completion tokens that are charged then.
local function add_cost(costs, job, completion, prompt, cached, completion_cost, prompt_cost)
  local new_tokens = math.max(completion - job[5], 0)
  local new_prompt = uncharged_prompt(job[7], prompt, cached)
  if new_tokens > 0 or new_prompt ~= 0 then
    local tenants = costs[is_batch(job[6]) and 4 or 2]
    local cost = (completion_cost * new_tokens + prompt_cost * new_prompt) / job[4]
    tenants[job[3]] = (tenants[job[3]] or 0) + cost
  end
  return job[5] + new_tokens
end

-- Charge each tenant once for all its jobs.
local function charge_all(costs)
  for lane, tenants in pairs(costs) do
    for tenant, cost in pairs(tenants) do charge(KEYS[lane], KEYS[lane + 1], tenant, cost) end
  end
end

-- Replace a job with its receipt, which keeps the job's expiry; delete it if its gateway has
-- already settled it.
local function leave_receipt(key, settled, completion, prompt, cached, gateway, attempt, engine)
  local expiry = call('PTTL', key)
  call('DEL', key)
  if settled then return end
  call('HSET', key, 'ended', 1, 'completion', completion or 0, 'prompt', prompt or 0,
    'cached', cached or 0, 'gateway', gateway, 'attempt', attempt,
    'engine', engine or '')
  call('PEXPIRE', key, expiry)
end

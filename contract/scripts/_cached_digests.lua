-- What a claim knows of waiting jobs, and what its worker holds of them (see contract.affinity).
-- @include server
-- @include sessions

local digest_bytes, adds = 8, 2 ^ 31

-- Return the tokens of a record, and whether they add to the tokens of prefixes.
local function tokens_of(records, number)
  local tokens = struct.unpack('>I4', records, (number - 1) * record_bytes + digest_bytes + 1)
  if tokens >= adds then return tokens - adds, true end
  return tokens, false
end

-- Note what of a job the worker holds: prompt tokens in its cache, and their sum with other tokens.
local function match(affinity, job)
  if not job.digests[1] then return end
  job.is_held = call('SMISMEMBER', affinity.held_prefix .. affinity.worker, unpack(job.digests))
  job.is_complete = job.is_held[1] == 1
  for number = #job.digests, 1, -1 do
    local tokens, is_added = tokens_of(job.records, number)
    if job.is_held[number] ~= 1 then
      if is_added then job.is_complete = false end
    elseif is_added then
      job.score = job.score + tokens
    else
      job.cached = tokens
    end
  end
  job.score = job.score + job.cached
end

-- Fields of a job that decide about its order, then those that only a lease reads.
local order_fields = {'need_tokens', 'sequences', 'prompt_tokens', 'weight', 'affinity', 'tenant',
  'passed_at', 'kept_for', 'kept_until', 'is_returned'}
local lease_fields = {'payload', 'reported', 'adapter', 'share', 'attempt', unpack(order_fields)}

-- Read of a waiting job what decides about its order, once in a claim; and what a lease reads, if it
-- is the likely one.
local function look_at(affinity, id, is_likely)
  local job = affinity.seen[id]
  if job then return job end
  local key = affinity.job_prefix .. id
  local fields = call('HMGET', key, unpack(is_likely and lease_fields or order_fields))
  local tokens, sequences, prompt, weight, records, tenant, passed_at, kept_for, kept_until,
    is_returned = unpack(fields, is_likely and 6 or 1)
  job = {
    fields = is_likely and fields,
    key = key, exists = tokens, tokens = tonumber(tokens), sequences = tonumber(sequences),
    passed_at = passed_at, kept_for = kept_for, kept_until = tonumber(kept_until),
    is_returned = is_returned == '1',
    prompt_tokens = tonumber(prompt), weight = tonumber(weight), score = 0, cached = 0
  }
  affinity.seen[id] = job
  if records then
    local session = session_of(records)
    job.class = class_of(records)
    if job.class then records = string.sub(records, record_bytes + 1) end
    job.records, job.digests = records, {}
    for i = 1, #records - (session and record_bytes or 0), record_bytes do
      job.digests[#job.digests + 1] = string.sub(records, i, i + digest_bytes - 1)
    end
    if affinity.holds_any then match(affinity, job) end
    job.is_foreign = job.class
      and call('SISMEMBER', affinity.held_prefix .. affinity.worker, job.class) == 0
    -- The server of its session is taken to hold all of it. The charge does not depend on this.
    job.server = session and server_of(affinity, tenant, session)
    if job.server then job.is_complete = job.server == affinity.worker end
    if job.is_foreign then job.is_complete = false end
    if job.server == affinity.worker then
      job.score = job.score + job.prompt_tokens - job.cached
    end
  end
  return job
end

-- Note that a job is passed over or kept. Return whether it is the first time.
local function note_passed(affinity, job)
  if job.passed_at then return false end
  job.passed_at = affinity.now
  call('HSET', job.key, 'passed_at', affinity.now)
  return true
end

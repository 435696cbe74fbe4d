-- What the reports of a worker charge to tenants.
-- @include places
-- @include counters

local costs = {requests = {}, batch = {}}

-- Return how many completion tokens of a report are not charged yet, and by how many prompt tokens
-- the claim has charged too few. The claim charges an estimate, `uncached`; the first report of the
-- prompt corrects it, and `uncached` is nil afterwards.
local function uncharged(charged, uncached, completion, prompt, cached)
  local corrects = uncached and prompt ~= '0'
  return math.max(completion - charged, 0), corrects and prompt - cached - uncached or 0
end

local function add_cost(place, tenant, cost)
  if cost == 0 then return end
  local tenants = is_batch(place) and costs.batch or costs.requests
  tenants[tenant] = (tenants[tenant] or 0) + cost
end

-- Charge each tenant once for all its jobs.
local function charge_all(active, counters, batch_active, batch_counters)
  for tenant, cost in pairs(costs.requests) do charge(active, counters, tenant, cost) end
  for tenant, cost in pairs(costs.batch) do charge(batch_active, batch_counters, tenant, cost) end
end

-- Run a command on a key with any number of words, of which an even number fits into one call.
local function call_in_parts(command, key, words)
  for i = 1, #words, 1000 do call(command, key, unpack(words, i, math.min(i + 999, #words))) end
end

-- Model shares: the percentage of an engine that a tenant may use.
--
-- A job that would exceed the share of its tenant waits, with the tenant's later jobs. A job larger
-- than the share runs if the tenant uses nothing else of the engine. While a tenant waits for its
-- share, it counts as if it did not wait: its counter is raised to that of the last tenant that goes
-- before it, so that it has no credit when its share is free, and other tenants that come get none.
--
-- `uses` has of each tenant with a share the sequences and tokens of its requests, then those of its
-- batch jobs: these do not count for requests, but requests count for them.

local function decode(json)
  return json == '' and {} or cjson.decode(json)
end

-- Return the use of a tenant and its most sequences; nil if it would exceed this share with a job.
local function use_within(room, tenant, share, tokens, sequences)
  local use = room.uses[tenant] or {0, 0, 0, 0}
  local most = math.max(math.floor(room.engine_sequences * share / 100), 1)
  local most_tokens = math.floor(room.engine_tokens * share / 100)
  local is_over = use[1] + math.min(sequences, most) > most or use[2] + tokens > most_tokens
  if is_over and use[1] > 0 then return nil end
  room.uses[tenant] = use
  return use, most
end

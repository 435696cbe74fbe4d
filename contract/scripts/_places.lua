-- Places of jobs in the queue of their tenant.
-- @include server

-- A place is `rank * tier_span`, plus `begun_span` if the job never started, plus a sequence number.
-- The spans are so large that sequence numbers never overlap; a double represents every place
-- exactly.
local tier_span, begun_span = 2 ^ 40, 2 ^ 39

-- Jobs of this rank are batch jobs. They wait in a lane of their own.
local batch_rank = 3

local function rank_of(place) return math.floor(place / tier_span) end

local function is_batch(place) return tonumber(place) >= batch_rank * tier_span end

-- Store how many of a tenant's waiting jobs of a tier never started: these can be shed.
local function recount(sheddable, queue, tenant, rank)
  local fresh = call('ZCOUNT', queue, rank * tier_span + begun_span, (rank + 1) * tier_span - 1)
  if fresh > 0 then
    call('ZADD', sheddable, rank * tier_span + fresh, rank .. ' ' .. tenant)
  else
    call('ZREM', sheddable, rank .. ' ' .. tenant)
  end
end

-- The next jobs of tenants: a full worker may make room for one of them.
-- @include room

local most_next_jobs, most_visited, most_read, next_job_fields = 8, 256, 32, 6

-- Return whether a tenant would use so much with more sequences that nobody makes room for them.
-- `rights` has the most that a tenant of weight 1 may use then, and sequences and weights of tenants.
-- Without a weight, whether a tenant that is known there would.
local function exceeds(rights, tenant, sequences, weight)
  local use = rights.most and (rights.uses[tenant] or weight and {0, 0})
  weight = use and math.max(weight or 0, use[2])
  return use and weight > 0 and (use[1] + sequences) / weight > rights.most
end

-- Add tenant, weight, KV-cache tokens, sequences and model share of the next job of a tenant, and 1 if
-- a slot must be freed for it, else 0. A job that may have no slot after another one is left out. Add it
-- to `later` instead, if given, if nobody makes room for it.
local function add_next_job(out, lane, tenant, job_prefix, room, later)
  if #out == most_next_jobs * next_job_fields then return end
  local id = call('ZRANGE', lane.queue .. tenant, 0, 0)[1]
  local weight, tokens, sequences, adapter, share = unpack(id and call('HMGET', job_prefix .. id,
    'weight', 'need_tokens', 'sequences', 'adapter', 'share') or {})
  if not weight then return end
  local lacks_slot = adapter and not room.has_slot[adapter] and room.free_slots == 0
  if lacks_slot or may_have_slot(room, adapter) then
    local counted = math.min(tonumber(sequences), room.most_sequences)
    if later and not lacks_slot and exceeds(room.rights, tenant, counted, weight) then out = later end
    for _, each in ipairs({tenant, weight, tokens, sequences, share or 100, lacks_slot and 1 or 0}) do
      out[#out + 1] = each
    end
  end
end

-- Add the next job of each tenant from this index on, whose counter is at most this limit. Jobs for
-- which nobody makes room are the last ones. Once there are enough of them, jobs of tenants that use
-- their share are not read. So a claim reads few jobs, however many tenants wait.
local function add_next_jobs(out, lane, index, limit, job_prefix, room)
  local tenants, later = call('ZRANGE', lane.active, index, index + most_visited - 1, 'WITHSCORES'), {}
  local most, read = most_next_jobs * next_job_fields, 0
  for i = 1, #tenants, 2 do
    if tonumber(tenants[i + 1]) > limit or #out == most or read == most_read then break end
    local is_skipped = #later >= most and room.free_slots ~= 0 and exceeds(room.rights, tenants[i], 1)
    if not is_skipped then
      add_next_job(out, lane, tenants[i], job_prefix, room, later)
      read = read + 1
    end
  end
  for i = 1, math.min(#later, most - #out) do out[#out + 1] = later[i] end
end

-- A worker that is full, or has requests that wait for shares, waits for its own doorbell. It rings
-- when a tenant begins to wait: first that of a worker that is not full, or of the one which repeats
-- fewest tokens if it makes room.
local function await_tenants(is_blocked, room, capped, full, doorbell, cost)
  local is_full = is_blocked or room.sequences <= 0
  if is_full or capped % 2 == 1 then call('ZADD', full, is_full and cost or -1, doorbell) end
end

-- Publish what tenants use of this worker's engine. Return what they use of the other full ones.
local function exchange_uses(workers, use_prefix, worker, use, now)
  local use_ms, most_others, others = 2000, 64, {}
  if use ~= '' then call('SET', use_prefix .. worker, use, 'PX', use_ms) end
  for _, other in ipairs(call('ZRANGEBYSCORE', workers, now, '+inf', 'LIMIT', 0, most_others)) do
    if other ~= worker then others[#others + 1] = use_prefix .. other end
  end
  return others[1] and call('MGET', unpack(others)) or {}
end

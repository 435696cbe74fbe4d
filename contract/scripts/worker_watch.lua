-- Find workers that are gone, and expire the leases of their jobs.
--
-- A worker is missing if its lease has expired, or if Redis has lost its connection to its channel.
-- It is gone if no heartbeat arrives within a grace period after it was first found missing. So
-- neither a pause of Redis nor a new connection of a live worker costs the worker its jobs. Another
-- worker looks after the jobs that are kept for it. A server of a cluster to which the keys have moved
-- never had the connection, until a heartbeat has seen it there.
--
-- KEYS watched: watched workers  workers, leases, doorbell: of requests  seen_on: servers that had
--   the connections of workers
-- ARGV grace_ms: grace period in milliseconds  held_prefix: of what workers hold
-- Output the workers that are gone; no later call returns them
-- @include cluster
-- @include doorbell
local watched, workers, leases, doorbell, seen_on = unpack(KEYS, 1, 5)
local channel_prefix, card_prefix, job_prefix, held_prefix, grace_ms = unpack(ARGV, 1, 5)
local now, gone, is_gone = now_ms(), {}, {}

local function has_lost(worker)
  local seen = redis.pcall('PUBSUB', 'NUMSUB', channel_prefix .. worker)
  if seen.err or tonumber(seen[2]) > 0 then return false end
  local server = call('HGET', seen_on, worker)
  return not server or server == server_id()
end

local scores = call('ZRANGE', watched, 0, -1, 'WITHSCORES')
for i = 1, #scores, 2 do
  local worker, score = scores[i], tonumber(scores[i + 1])
  if score < 0 then
    if now + score >= tonumber(grace_ms) then
      gone[#gone + 1] = worker
      is_gone[worker] = true
      call('ZREM', watched, worker)
      call('HDEL', seen_on, worker)
      call('ZREM', workers, worker)
      call('DEL', card_prefix .. worker, held_prefix .. worker)
    end
  elseif score <= now or has_lost(worker) then
    call('ZADD', watched, -now, worker)
  end
end

if #gone > 0 then
  ring(doorbell)
  for _, id in ipairs(call('ZRANGE', leases, 0, -1)) do
    local worker = call('HGET', job_prefix .. id, 'worker')
    if worker and is_gone[worker] then call('ZADD', leases, now, id) end
  end
end
return gone

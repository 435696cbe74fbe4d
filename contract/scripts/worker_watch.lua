-- Find workers that are gone, and expire the leases of their jobs.
--
-- A worker is missing if its lease has expired, or if Redis has lost its connection to its channel.
-- It is gone if no heartbeat arrives within a grace period after it was first found missing. So
-- neither a pause of Redis nor a new connection of a live worker costs the worker its jobs.
--
-- KEYS[1] watched workers  KEYS[2] workers  KEYS[3] leases
-- ARGV[1] channel prefix  ARGV[2] worker card prefix  ARGV[3] job prefix
-- ARGV[4] grace period in milliseconds  ARGV[5] prefix of what workers hold
-- Output the workers that are gone; no later call returns them
local watched, leases = KEYS[1], KEYS[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function is_connected(worker)
  local seen = redis.pcall('PUBSUB', 'NUMSUB', ARGV[1] .. worker)
  return seen.err or tonumber(seen[2]) > 0
end

local gone, is_gone = {}, {}
local scores = redis.call('ZRANGE', watched, 0, -1, 'WITHSCORES')
for i = 1, #scores, 2 do
  local worker, score = scores[i], tonumber(scores[i + 1])
  if score < 0 then
    if now + score >= tonumber(ARGV[4]) then
      gone[#gone + 1] = worker
      is_gone[worker] = true
      redis.call('ZREM', watched, worker)
      redis.call('ZREM', KEYS[2], worker)
      redis.call('DEL', ARGV[2] .. worker, ARGV[5] .. worker)
    end
  elseif score <= now or not is_connected(worker) then
    redis.call('ZADD', watched, -now, worker)
  end
end

if #gone > 0 then
  for _, id in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
    local worker = redis.call('HGET', ARGV[3] .. id, 'worker')
    if worker and is_gone[worker] then redis.call('ZADD', leases, now, id) end
  end
end
return gone

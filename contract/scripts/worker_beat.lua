-- Renew the lease of a worker, if Redis has the worker's connection to its channel.
--
-- Redis drops the subscription when the worker's process ends, so worker_watch detects that at
-- once. A worker without a subscription is not watched: only the leases of its jobs expire.
--
-- KEYS watched: watched workers  seen_on: servers that had their connections
-- ARGV worker, channel, lease_ms: 0 to end the lease
-- Output 1 if the worker is watched, else 0
-- @include cluster
local watched, seen_on = unpack(KEYS, 1, 2)
local worker, channel, lease_ms = unpack(ARGV, 1, 3)
-- PUBSUB fails if the user may not run it.
local seen = redis.pcall('PUBSUB', 'NUMSUB', channel)
if seen.err or tonumber(seen[2]) == 0 or lease_ms == '0' then
  call('ZREM', watched, worker)
  call('HDEL', seen_on, worker)
  return 0
end
call('ZADD', watched, now_ms() + lease_ms, worker)
local id = server_id()
if id ~= '' then call('HSET', seen_on, worker, id) end
return 1

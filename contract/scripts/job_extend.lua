-- Renew a worker's leases and charge the tokens generated since the last report.
--
-- Totals are reported, not differences, so that a repeated report charges nothing.
--
-- KEYS[1] active tenants  KEYS[2] service counters  KEYS[3] leases
-- ARGV[1] job prefix  ARGV[2] worker  ARGV[3] cost of a completion token  ARGV[4] lease in milliseconds
-- ARGV[5..] for each job: id, attempt, completion tokens so far
-- Output the ids that this worker holds no longer (cancelled, or leased to somebody else): it must abort them
local active, counters, leases = KEYS[1], KEYS[2], KEYS[3]
local time = redis.call('TIME')
local expiry = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[4]
local lost = {}
for i = 5, #ARGV, 3 do
  local id, key = ARGV[i], ARGV[1] .. ARGV[i]
  local job = redis.call('HMGET', key, 'worker', 'attempt', 'tenant', 'weight', 'charged')
  if job[1] ~= ARGV[2] or job[2] ~= ARGV[i + 1] then
    lost[#lost + 1] = id
  else
    local new_tokens = ARGV[i + 2] - job[5]
    if new_tokens > 0 then
      redis.call('HSET', key, 'charged', ARGV[i + 2])
      local cost = string.format('%.17g', ARGV[3] * new_tokens / job[4])
      redis.call('ZADD', active, 'XX', redis.call('HINCRBYFLOAT', counters, job[3], cost), job[3])
    end
    redis.call('ZADD', leases, expiry, id)
    redis.call('HDEL', key, 'reported')
  end
end
return lost

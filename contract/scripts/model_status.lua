-- Return the current workers and jobs of a model.
--
-- A process that removes a job from the queue removes it from the arrivals too. Jobs that expire
-- leave entries. This script drops such entries at the front, some on each call.
--
-- KEYS workers, waiting, leases, active, arrivals, batch_waiting
-- ARGV job_prefix
-- Output {workers that claim jobs, waiting jobs, leased jobs, tenants with waiting jobs,
-- milliseconds that the oldest of these jobs has waited, waiting batch jobs}: batch jobs count only
-- in the last number and as leased jobs
-- @include server
local workers, waiting, leases, active, arrivals, batch_waiting = unpack(KEYS, 1, 6)
local job_prefix = unpack(ARGV, 1, 1)
local most_dropped, now, oldest = 100, now_ms(), 0
call('ZREMRANGEBYSCORE', workers, '-inf', now)
for _ = 1, most_dropped do
  local id, arrived = unpack(call('ZRANGE', arrivals, 0, 0, 'WITHSCORES'))
  if not id then break end
  if call('HGET', job_prefix .. id, 'worker') == '' then
    oldest = math.max(now - arrived, 0)
    break
  end
  call('ZREM', arrivals, id)
end
return {call('ZCARD', workers), tonumber(call('GET', waiting) or '0'), call('ZCARD', leases),
  call('ZCARD', active), oldest, tonumber(call('GET', batch_waiting) or '0')}

-- Find expired leases, so that the gateway that owns each job can requeue or cancel it.
--
-- The lease stays until that gateway requeues or cancels the job. It is reported again after a
-- while, so a lost report does no harm. A worker that returns and extends its lease before the
-- gateway has decided keeps the job. A cancelled job is not reported: no worker will end it, so the
-- last reported counts become its receipt (see job_finish).
--
-- KEYS[1] leases
-- ARGV[1] job prefix  ARGV[2] most jobs to look at
-- ARGV[3] milliseconds after which a job is reported again
-- Output {id, tenant, gateway, handle, attempt, ...}
local leases = KEYS[1]
local now = now_ms()
local out = {}
for _, id in ipairs(call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, ARGV[2])) do
  local key = ARGV[1] .. id
  local job = call('HMGET', key, 'tenant', 'gateway', 'handle', 'attempt', 'reported',
    'cancelled', 'settled', 'completion', 'prompt', 'cached', 'engine')
  if not job[1] then
    call('ZREM', leases, id)
  elseif job[6] then
    call('ZREM', leases, id)
    leave_receipt(key, job[7], job[8], job[9], job[10], job[2], job[4], job[11])
  elseif not job[5] or now - job[5] >= tonumber(ARGV[3]) then
    call('HSET', key, 'reported', now)
    -- Others come first at the next call, however many a stuck gateway leaves unresolved.
    call('ZADD', leases, now, id)
    out[#out + 1] = id
    for field = 1, 4 do out[#out + 1] = job[field] end
  end
end
return out

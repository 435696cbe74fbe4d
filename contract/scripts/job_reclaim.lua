-- Find expired leases, so that the gateway that owns each job can requeue or cancel it.
--
-- The lease stays until that gateway requeues or cancels the job. It is reported again after a
-- while, so a lost report does no harm. A worker that returns and extends its lease before the
-- gateway has decided keeps the job. A cancelled job is not reported: no worker will end it, so the
-- last reported counts become its receipt (see job_finish).
--
-- KEYS leases
-- ARGV most: jobs to look at  again_ms: milliseconds after which a job is reported again
-- Output {id, tenant, gateway, handle, attempt, ...}
-- @include receipts
local leases = unpack(KEYS, 1, 1)
local job_prefix, most, again_ms = unpack(ARGV, 1, 3)
local now, out = now_ms(), {}
for _, id in ipairs(call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, most)) do
  local key = job_prefix .. id
  local tenant, gateway, handle, attempt, reported, cancelled, settled, completion, prompt, cached,
    engine = unpack(call('HMGET', key, 'tenant', 'gateway', 'handle', 'attempt', 'reported',
      'cancelled', 'settled', 'completion', 'prompt', 'cached', 'engine'))
  if not tenant then
    call('ZREM', leases, id)
  elseif cancelled then
    call('ZREM', leases, id)
    leave_receipt(key, settled, completion, prompt, cached, gateway, attempt, engine)
  elseif not reported or now - reported >= tonumber(again_ms) then
    call('HSET', key, 'reported', now)
    -- Others come first at the next call, however many a stuck gateway leaves unresolved.
    call('ZADD', leases, now, id)
    for _, value in ipairs({id, tenant, gateway, handle, attempt}) do out[#out + 1] = value end
  end
end
return out

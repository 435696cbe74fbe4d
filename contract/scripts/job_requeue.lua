-- Put a lost job back at its old place, the head of its tier in its tenant's queue, for another
-- worker.
--
-- KEYS leases, job, then the eleven keys of each lane and the tenant (see _lanes)
-- ARGV lost_attempt: the attempt that was lost  is_returned: 1 if its worker returned it, else 0
--   need_tokens: KV-cache tokens needed
--   completion, prompt, cached: tokens that were received of it, for its receipt
--   affinity: see contract.affinity
-- Output 1 requeued, 2 requeued by an earlier call, 0 held (its worker came back), -1 ended or
-- cancelled, -2 unknown, or only with an earlier attempt: Redis has lost data
-- @include waiting
local leases, key = unpack(KEYS, 1, 2)
local id, tenant, lost_attempt, is_returned, need_tokens, payload, completion, prompt, cached,
  affinity = unpack(ARGV, 1, 10)
local worker, attempt, place, cancelled, ended = unpack(
  call('HMGET', key, 'worker', 'attempt', 'place', 'cancelled', 'ended'))
if cancelled or ended then return -1 end
if not worker or tonumber(attempt) < tonumber(lost_attempt) then return -2 end
if attempt ~= lost_attempt or worker == '' then return 2 end
local is_held = tonumber(call('ZSCORE', leases, id) or '0') > now_ms()
if is_held and is_returned ~= '1' then return 0 end
call('ZREM', leases, id)
-- The next attempt continues after what was received; tokens that the lost attempt counted beyond
-- that are void.
call('HSET', key, 'worker', '', 'need_tokens', need_tokens, 'payload', payload,
  'completion', completion, 'prompt', prompt, 'cached', cached, 'is_returned', is_returned)
if affinity ~= '' then call('HSET', key, 'affinity', affinity) end
-- It may be kept again, for its class, or for its worker.
call('HDEL', key, 'passed_at', 'kept_for', 'kept_until')
-- The job may have been promoted since its gateway enqueued it.
enter(lanes_at(3)(place), tenant, id, place, now_ms())
return 1

-- Put a lost job back at its old place, the head of its tier in its tenant's queue, for another
-- worker.
--
-- KEYS[1] leases  KEYS[2] job
-- KEYS[3..12] of requests: active tenants, service counters, last active, waiting, doorbell,
-- sheddable, the model's pace, arrivals, the tenant's queue, the tenant's pace
-- KEYS[13..22] the same of batch jobs
-- ARGV[1] id  ARGV[2] tenant  ARGV[3] the attempt that was lost  ARGV[4] 1 if its worker returned
-- it, else 0
-- ARGV[5] KV-cache tokens needed  ARGV[6] payload
-- ARGV[7] completion tokens that were received of it  ARGV[8] prompt tokens
-- ARGV[9] cached tokens, for its receipt
-- Output 1 requeued, 2 requeued by an earlier call, 0 held (its worker came back), -1 ended or
-- cancelled, -2 unknown, or only with an earlier attempt: Redis has lost data
local leases, key = KEYS[1], KEYS[2]
local job = call('HMGET', key, 'worker', 'attempt', 'place', 'cancelled', 'ended')
if job[4] or job[5] then return -1 end
if not job[1] then return -2 end
local lost = tonumber(ARGV[3])
local attempt = tonumber(job[2])
if attempt < lost then return -2 end
if attempt > lost or job[1] == '' then return 2 end
local expiry = call('ZSCORE', leases, ARGV[1])
local is_held = expiry and tonumber(expiry) > now_ms()
if is_held and ARGV[4] ~= '1' then return 0 end
call('ZREM', leases, ARGV[1])
-- The next attempt continues after what was received; tokens that the lost attempt counted beyond
-- that are void.
call('HSET', key, 'worker', '', 'need_tokens', ARGV[5], 'payload', ARGV[6],
  'completion', ARGV[7], 'prompt', ARGV[8], 'cached', ARGV[9])
-- The job may have been promoted since its gateway enqueued it.
local lane = is_batch(job[3]) and 13 or 3
local queue = KEYS[lane + 8]
call('ZADD', queue, job[3], ARGV[1])
call('ZADD', KEYS[lane + 7], now_ms(), ARGV[1])
if call('ZCARD', queue) == 1 then
  begin_waiting(KEYS[lane], KEYS[lane + 1], KEYS[lane + 2], ARGV[2])
end
call('INCR', KEYS[lane + 3])
call('RPUSH', KEYS[lane + 4], 1)
return 1

-- Enqueue a job whatever its state: lost with Redis' memory, running for a dead gateway, waiting,
-- or ended and to be resumed. The attempt number fences off a worker that still runs it.
--
-- KEYS[1] leases  KEYS[2] job
-- KEYS[3..12] of requests: active tenants, service counters, last active, waiting, doorbell,
-- sheddable, the model's pace, arrivals, the tenant's queue, the tenant's pace
-- KEYS[13..22] the same of batch jobs
-- KEYS[23] sequence
-- ARGV[1] id  ARGV[2] tenant  ARGV[3] an attempt that is over  ARGV[4] KV-cache tokens needed
-- ARGV[5] payload
-- ARGV[6] weight  ARGV[7] rank of the job's tier, which a promoted job has left  ARGV[8] prompt tokens  ARGV[9] sequences
-- ARGV[10] gateway  ARGV[11] handle  ARGV[12] milliseconds after which an abandoned job disappears
-- ARGV[13] completion tokens that were received of it  ARGV[14] prompt tokens
-- ARGV[15] cached tokens, for its receipt  ARGV[16] affinity (see contract.affinity)
-- ARGV[17] digest of its adapter; empty: none
-- Output the last attempt that is over: the next claim is the one after it
local leases, key = KEYS[1], KEYS[2]
local job = call('HMGET', key, 'attempt', 'place', 'charged', 'ended', 'completion', 'weight',
  'uncached')
-- An ended job has been charged completely; an unknown one must have been charged for what was
-- received.
local charged = math.max(tonumber(job[4] and job[5] or job[3] or '0'), tonumber(ARGV[13]))
local over = math.max(tonumber(job[1] or '0'), tonumber(ARGV[3]))
local place = job[2] or string.format('%.0f', ARGV[7] * tier_span + call('INCR', KEYS[23]))
local lane = is_batch(place) and 13 or 3
local active, waiting, queue = KEYS[lane], KEYS[lane + 3], KEYS[lane + 8]
call('ZREM', leases, ARGV[1])
if call('ZREM', queue, ARGV[1]) == 1 then call('DECR', waiting) end
call('DEL', key)
call('HSET', key, 'tenant', ARGV[2], 'weight', job[6] or ARGV[6], 'prompt_tokens', ARGV[8],
  'sequences', ARGV[9], 'need_tokens', ARGV[4], 'gateway', ARGV[10], 'handle', ARGV[11],
  'payload', ARGV[5], 'place', place, 'attempt', over, 'charged', charged, 'worker', '',
  'completion', ARGV[13], 'prompt', ARGV[14], 'cached', ARGV[15])
if job[7] then call('HSET', key, 'uncached', job[7]) end
if ARGV[16] ~= '' then call('HSET', key, 'affinity', ARGV[16]) end
if ARGV[17] ~= '' then call('HSET', key, 'adapter', ARGV[17]) end
call('PEXPIRE', key, ARGV[12])
-- As on arrival (see job_enqueue), a job that never started goes after all that have, and can be
-- shed.
call('ZADD', queue, over > 0 and place or place + begun_span, ARGV[1])
call('ZADD', KEYS[lane + 7], now_ms(), ARGV[1])
recount(KEYS[lane + 5], queue, ARGV[2], math.floor(place / tier_span))
if not call('ZSCORE', active, ARGV[2]) then
  begin_waiting(active, KEYS[lane + 1], KEYS[lane + 2], ARGV[2])
end
call('INCR', waiting)
call('RPUSH', KEYS[lane + 4], 1)
return over

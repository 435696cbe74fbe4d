-- Cancel a waiting or leased job.
--
-- A waiting job is deleted; only a receipt of what earlier attempts delivered remains. A worker
-- that holds the job is notified through its control list, and ends the job with its counts; the
-- lease remains until then. If the lease has expired, no worker will end the job, so the last
-- reported counts become its receipt (see job_finish). Tokens that were generated stay charged; a
-- job that only waited is not charged.
--
-- KEYS[1] leases  KEYS[2] job
-- KEYS[3..12] of requests: active tenants, service counters, last active, waiting, doorbell,
-- sheddable, the model's pace, arrivals, the tenant's queue, the tenant's pace
-- KEYS[13..22] the same of batch jobs
-- ARGV[1] id  ARGV[2] tenant  ARGV[3] control prefix
-- Output 0 unknown or ended, 1 was waiting and is deleted, 2 is leased, 3 was lost and has ended
local leases, key = KEYS[1], KEYS[2]
local job = call('HMGET', key, 'worker', 'cancelled', 'settled', 'completion', 'prompt',
  'cached', 'gateway', 'attempt', 'place', 'engine')
local worker = job[1]
if not worker then return 0 end

local function end_with_receipt()
  leave_receipt(key, job[3], job[4], job[5], job[6], job[7], job[8], job[10])
end

if worker == '' then
  if tonumber(job[4] or '0') + tonumber(job[5] or '0') > 0 then
    end_with_receipt()
  else
    call('DEL', key)
  end
  local lane = is_batch(job[9]) and 13 or 3
  local active, last, waiting = KEYS[lane], KEYS[lane + 2], KEYS[lane + 3]
  local queue = KEYS[lane + 8]
  local place = call('ZSCORE', queue, ARGV[1])
  if place then
    call('ZREM', queue, ARGV[1])
    call('ZREM', KEYS[lane + 7], ARGV[1])
    call('DECR', waiting)
    -- As on a claim, the number of jobs that can be shed may change.
    recount(KEYS[lane + 5], queue, ARGV[2], math.floor(place / tier_span))
  end
  if call('ZCARD', queue) == 0 and call('ZREM', active, ARGV[2]) == 1 then
    call('SET', last, ARGV[2])
    call('HDEL', KEYS[lane + 9], 'at', 'given')
    if call('ZCARD', active) == 0 then call('HDEL', KEYS[lane + 6], 'at', 'given') end
  end
  return 1
end

if not job[2] then
  call('HSET', key, 'cancelled', 1)
  call('RPUSH', ARGV[3] .. worker, ARGV[1])
  call('PEXPIRE', ARGV[3] .. worker, 60000)
end
local lease = tonumber(call('ZSCORE', leases, ARGV[1]) or '0')
if lease > now_ms() then return 2 end

call('ZREM', leases, ARGV[1])
end_with_receipt()
return 3

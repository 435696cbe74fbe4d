-- Cancel a waiting or leased job.
--
-- A waiting job is deleted; only a receipt of what earlier attempts delivered remains. A worker
-- that holds the job is notified through its control list, and ends the job with its counts; the
-- lease remains until then. If the lease has expired, no worker will end the job, so the last
-- reported counts become its receipt (see job_finish). Tokens that were generated stay charged; a
-- job that only waited is not charged.
--
-- KEYS leases, job, then the eleven keys of each lane and the tenant (see _lanes)
-- ARGV id, tenant, control_prefix: of the workers' control lists
-- Output 0 unknown or ended, 1 was waiting and is deleted, 2 is leased, 3 was lost and has ended
-- @include waiting
-- @include receipts
local leases, key = unpack(KEYS, 1, 2)
local id, tenant, control_prefix = unpack(ARGV, 1, 3)
local control_expiry_ms = 60000
local worker, cancelled, settled, completion, prompt, cached, gateway, attempt, place, engine =
  unpack(call('HMGET', key, 'worker', 'cancelled', 'settled', 'completion', 'prompt', 'cached',
    'gateway', 'attempt', 'place', 'engine'))
if not worker then return 0 end

local function end_with_receipt()
  leave_receipt(key, settled, completion, prompt, cached, gateway, attempt, engine)
end

if worker == '' then
  if tonumber(completion or '0') + tonumber(prompt or '0') > 0 then
    end_with_receipt()
  else
    call('DEL', key)
  end
  leave(lanes_at(3)(place), tenant, id, rank_of(place))
  return 1
end

write_if_full(leases)
if not cancelled then
  local control = control_prefix .. worker
  call('HSET', key, 'cancelled', 1)
  call('RPUSH', control, id)
  call('PEXPIRE', control, control_expiry_ms)
end
if tonumber(call('ZSCORE', leases, id) or '0') > now_ms() then return 2 end

call('ZREM', leases, id)
end_with_receipt()
return 3

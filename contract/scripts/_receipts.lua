-- Receipts: the final counts of jobs, for their gateways.
-- @include server

-- Replace a job with its receipt, which keeps the job's expiry; delete it if its gateway has
-- already settled it.
local function leave_receipt(key, settled, completion, prompt, cached, gateway, attempt, engine)
  local expiry = call('PTTL', key)
  call('DEL', key)
  if settled then return end
  call('HSET', key, 'ended', '1', 'completion', completion or '0', 'prompt', prompt or '0',
    'cached', cached or '0', 'gateway', gateway, 'attempt', attempt, 'engine', engine or '')
  call('PEXPIRE', key, expiry)
end

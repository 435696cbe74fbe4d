-- Enqueue a job whatever its state: lost with Redis' memory, running for a dead gateway, waiting,
-- or ended and to be resumed. The attempt number fences off a worker that still runs it.
--
-- KEYS leases, job, sequence, then the eleven keys of each lane and the tenant (see _lanes)
-- ARGV over_attempt: an attempt that is over  need_tokens: KV-cache tokens needed
--   rank: of the job's tier, which a promoted job has left
--   expires_ms: milliseconds after which an abandoned job disappears
--   completion, prompt, cached: tokens that were received of it, for its receipt
--   affinity: see contract.affinity  adapter: its digest; empty: none
--   share: model share of its tenant in percent
-- Output the last attempt that is over: the next claim is the one after it
-- @include waiting
local leases, key, sequence = unpack(KEYS, 1, 3)
local id, tenant, over_attempt, need_tokens, payload, weight, rank, prompt_tokens, sequences,
  gateway, handle, expires_ms, completion, prompt, cached, affinity, adapter, share =
  unpack(ARGV, 1, 18)
local attempt, place, charged, ended, reported, old_weight, uncached = unpack(call('HMGET', key,
  'attempt', 'place', 'charged', 'ended', 'completion', 'weight', 'uncached'))
-- An ended job has been charged completely; an unknown one must have been charged for what was
-- received.
charged = math.max(tonumber(ended and reported or charged or '0'), tonumber(completion))
local over = math.max(tonumber(attempt or '0'), tonumber(over_attempt))
place = place or string.format('%.0f', rank * tier_span + call('INCR', sequence))
local lane = lanes_at(4)(place)
call('ZREM', leases, id)
if call('ZREM', lane.queue, id) == 1 then call('DECR', lane.waiting) end
call('DEL', key)
call('HSET', key, 'tenant', tenant, 'weight', old_weight or weight, 'prompt_tokens', prompt_tokens,
  'sequences', sequences, 'need_tokens', need_tokens, 'gateway', gateway, 'handle', handle,
  'payload', payload, 'place', place, 'attempt', over, 'charged', charged, 'worker', '',
  'completion', completion, 'prompt', prompt, 'cached', cached)
if uncached then call('HSET', key, 'uncached', uncached) end
if affinity ~= '' then call('HSET', key, 'affinity', affinity) end
if adapter ~= '' then call('HSET', key, 'adapter', adapter) end
if share ~= '100' then call('HSET', key, 'share', share) end
call('PEXPIRE', key, expires_ms)
-- As on arrival (see job_enqueue), a job that never started goes after all that have, and can be
-- shed.
enter(lane, tenant, id, over > 0 and place or place + begun_span, now_ms())
return over

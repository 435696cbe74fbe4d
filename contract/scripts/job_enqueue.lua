-- Put the jobs of one request on the queue, all or none.
--
-- Within its tenant a job's place is its tier's rank, then the order of arrival. A tenant that had nothing
-- waiting is lifted to the lowest counter among the waiting tenants (or to the last leaver's counter when
-- nobody waits), so that idle time earns no credit (VTC, OSDI'24).
--
-- KEYS[1] active tenants   KEYS[2] service counters   KEYS[3] last active   KEYS[4] the tenant's queue
-- KEYS[5] waiting          KEYS[6] doorbell           KEYS[7] sequence      KEYS[8..] one job hash for each job
-- ARGV[1] tenant  ARGV[2] weight  ARGV[3] most waiting jobs of the model  ARGV[4] most waiting jobs of the tenant
-- ARGV[5] milliseconds after which an abandoned job disappears  ARGV[6] rank of the jobs' tier, 0 goes first
-- ARGV[7..] for each job: id, prompt tokens, sequences, KV-cache tokens needed, gateway, handle, payload
-- Output {code, waiting jobs of the model}: 1 enqueued, 0 known already, -1 model full, -2 tenant full
local active, counters, last, queue, waiting, doorbell = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local tenant, weight = ARGV[1], ARGV[2]
local first_job, fields = 7, 7
local jobs = #KEYS - first_job
local depth = tonumber(redis.call('GET', waiting) or '0')
local tenant_depth = redis.call('ZCARD', queue)

if redis.call('EXISTS', KEYS[first_job + 1]) == 1 then return {0, depth} end
if depth + jobs > tonumber(ARGV[3]) then return {-1, depth} end
if tenant_depth + jobs > tonumber(ARGV[4]) then return {-2, depth} end

if tenant_depth == 0 then
  local counter = tonumber(redis.call('HGET', counters, tenant) or '0')
  local lift = tonumber(redis.call('ZRANGE', active, 0, 0, 'WITHSCORES')[2])
  if not lift then
    local leaver = redis.call('GET', last)
    lift = leaver and tonumber(redis.call('HGET', counters, leaver)) or 0
  end
  local score = string.format('%.17g', math.max(counter, lift))
  redis.call('HSET', counters, tenant, score)
  redis.call('ZADD', active, score, tenant)
end

-- Ranks lie so far apart that no sequence number reaches the next one; a double counts both exactly.
local before = ARGV[6] * 2 ^ 40 + redis.call('INCRBY', KEYS[7], jobs) - jobs
for i = 1, jobs do
  local a = first_job + (i - 1) * fields
  local key, place = KEYS[first_job + i], string.format('%.0f', before + i)
  redis.call('HSET', key, 'tenant', tenant, 'weight', weight, 'prompt_tokens', ARGV[a + 1], 'sequences', ARGV[a + 2],
    'need_tokens', ARGV[a + 3], 'gateway', ARGV[a + 4], 'handle', ARGV[a + 5], 'payload', ARGV[a + 6],
    'place', place, 'attempt', 0, 'charged', 0, 'worker', '')
  redis.call('PEXPIRE', key, ARGV[5])
  redis.call('ZADD', queue, place, ARGV[a])
end
redis.call('INCRBY', waiting, jobs)
redis.call('RPUSH', doorbell, 1)
redis.call('LTRIM', doorbell, 0, 255)
return {1, depth + jobs}

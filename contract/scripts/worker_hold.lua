-- Update what a worker holds, for the affinity of jobs (see _affinity).
--
-- The holders name one worker for each digest. An entry may be out of date, so whoever uses it looks
-- into what that worker holds. Random entries go if there are too many: this costs cache hits only.
--
-- KEYS held: what the worker holds  holders
-- ARGV ttl_ms: milliseconds until the former expires  starts_over: 1 to forget it first, else 0
--   most_holders, removed: number of removed digests; then removed digests, then added ones
-- Output how many digests the worker holds
-- @include server
local held, holders = unpack(KEYS, 1, 2)
local worker, ttl_ms, starts_over, most_holders, removed = unpack(ARGV, 1, 5)
local first_removed, dropped_at_once = 6, 1000
local first_added = first_removed + removed
if starts_over == '1' then call('DEL', held) end
for i = first_removed, first_added - 1 do
  call('SREM', held, ARGV[i])
  if call('HGET', holders, ARGV[i]) == worker then call('HDEL', holders, ARGV[i]) end
end
for i = first_added, #ARGV do
  call('SADD', held, ARGV[i])
  call('HSET', holders, ARGV[i], worker)
end
call('PEXPIRE', held, ttl_ms)
local excess = call('HLEN', holders) - most_holders
if excess > 0 then
  call('HDEL', holders, unpack(call('HRANDFIELD', holders, math.min(excess, dropped_at_once))))
end
return call('SCARD', held)

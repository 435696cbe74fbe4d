-- Write the durable counters of a subject, unless something changed after they were derived.
--
-- Amounts that open reservations hold of the same day and month stay.
--
-- KEYS[1] account  KEYS[2] accounts
-- ARGV[1] subject  ARGV[2] version of the account before the counters were derived  ARGV[3] day
-- ARGV[4] requests  ARGV[5] tokens of the day  ARGV[6] month  ARGV[7] cost of the month
-- ARGV[8] credit, empty if it has none
-- Output 1 if written, 0 if it is already seeded or the version differs
local ACCOUNT_MS = 3456000000
local seen = redis.call('HMGET', KEYS[1], 'seeded', 'v', 'day', 'month')
if seen[1] or (seen[2] or '0') ~= ARGV[2] then return 0 end
if seen[3] ~= ARGV[3] then redis.call('HDEL', KEYS[1], 'qo', 'to') end
if seen[4] ~= ARGV[6] then redis.call('HDEL', KEYS[1], 'r') end
redis.call('HSET', KEYS[1],
  'seeded', 1, 'day', ARGV[3], 'q', ARGV[4], 't', ARGV[5], 'month', ARGV[6], 's', ARGV[7])
if ARGV[8] ~= '' then redis.call('HSET', KEYS[1], 'credit', ARGV[8]) end
redis.call('PEXPIRE', KEYS[1], ACCOUNT_MS)
redis.call('SADD', KEYS[2], ARGV[1])
return 1

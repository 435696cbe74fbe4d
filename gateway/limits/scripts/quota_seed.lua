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
local NUMBERS = '>dddddddddd'
local seen = redis.call('HMGET', KEYS[1], 'seeded', 'v', 'n')
if seen[1] or (seen[2] or '0') ~= ARGV[2] then return 0 end
local day, month, qo, to, r, cr, credit, _ = tonumber(ARGV[3]), tonumber(ARGV[6]), 0, 0, 0, 0,
  math.huge, nil
if seen[3] then
  local old_day, old_month
  old_day, old_month, _, _, _, qo, to, r, credit, cr = struct.unpack(NUMBERS, seen[3])
  if old_day ~= day then qo, to = 0, 0 end
  if old_month ~= month then r = 0 end
end
redis.call('HSET', KEYS[1], 'seeded', 1, 'n', struct.pack(NUMBERS, day, month, tonumber(ARGV[4]),
  tonumber(ARGV[5]), tonumber(ARGV[7]), qo, to, r, tonumber(ARGV[8]) or credit, cr))
redis.call('PEXPIRE', KEYS[1], ACCOUNT_MS)
redis.call('SADD', KEYS[2], ARGV[1])
return 1

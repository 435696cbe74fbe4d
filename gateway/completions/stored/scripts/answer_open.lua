-- Write a whole response: at its beginning, and again if Redis has lost it.
--
-- KEYS[1] response  KEYS[2] journal
-- ARGV[1] term  ARGV[2] TTL in milliseconds  ARGV[3] head  ARGV[4] owner  ARGV[5] handles
-- ARGV[6] reservation  ARGV[7] state  ARGV[8] settled tokens  ARGV[9..] journal entries
-- Returns 1 if written, 0 if another gateway owns it (nothing is changed)
local term = redis.call('HGET', KEYS[1], 'term')
if term and tonumber(term) > tonumber(ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'term', ARGV[1], 'head', ARGV[3], 'owner', ARGV[4], 'handles', ARGV[5],
  'reservation', ARGV[6], 'state', ARGV[7], 'settled', ARGV[8])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
for i = 9, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[i]) end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1

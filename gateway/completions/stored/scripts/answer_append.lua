-- Append to a response's journal and update its status. Skips entries appended by an earlier call.
--
-- KEYS[1] response  KEYS[2] journal
-- ARGV[1] term  ARGV[2] TTL in milliseconds  ARGV[3] number of entries before the given ones
-- ARGV[4] handles  ARGV[5] reservation  ARGV[6] state  ARGV[7] settled tokens
-- ARGV[8..] journal entries
-- Returns 1 if done, 0 if another gateway owns it, -1 if Redis lost some or all of it (no effect)
local term = redis.call('HGET', KEYS[1], 'term')
if not term or tonumber(term) < tonumber(ARGV[1]) then return -1 end
if term ~= ARGV[1] then return 0 end
local known = redis.call('LLEN', KEYS[2]) - ARGV[3]
if known < 0 then return -1 end
for i = 8 + known, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[i]) end
redis.call('HDEL', KEYS[1], 'unread_owner', 'unread_handles')
redis.call('HSET', KEYS[1], 'handles', ARGV[4], 'reservation', ARGV[5], 'state', ARGV[6], 'settled', ARGV[7])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1

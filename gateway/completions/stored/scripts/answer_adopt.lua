-- Begin a new term of a response, with another gateway as its owner.
--
-- The former owner's handles stay in `unread_owner` and `unread_handles` until the new owner has
-- written: its journal may lack replies to them, and the new owner may die before it has any.
--
-- KEYS[1] response  KEYS[2] journal
-- ARGV[1] the term that ends  ARGV[2] its state  ARGV[3] TTL in milliseconds  ARGV[4] owner
-- ARGV[5] no handles  ARGV[6] new state  ARGV[7] head
-- Returns the new term, or 0 if the response is gone or has changed its term or state (no effect)
local known = redis.call('HMGET', KEYS[1], 'term', 'state', 'owner', 'handles')
if known[1] ~= ARGV[1] or known[2] ~= ARGV[2] then return 0 end
if known[2] ~= ARGV[6] then
  redis.call('HDEL', KEYS[1], 'unread_owner', 'unread_handles')
elseif known[4] ~= ARGV[5] then
  redis.call('HSET', KEYS[1], 'unread_owner', known[3], 'unread_handles', known[4])
end
local term = redis.call('HINCRBY', KEYS[1], 'term', 1)
redis.call('HSET', KEYS[1], 'owner', ARGV[4], 'handles', ARGV[5], 'state', ARGV[6], 'head', ARGV[7])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return term

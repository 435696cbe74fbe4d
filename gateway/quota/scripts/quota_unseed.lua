-- Have the durable numbers of a subject derived again, since what they come from has changed.
--
-- The version grows, so that numbers which are being derived right now are not written.
--
-- KEYS[1] account
-- Output 1 if it was seeded, else 0
redis.call('HINCRBY', KEYS[1], 'v', 1)
redis.call('PEXPIRE', KEYS[1], 3456000000)
return redis.call('HDEL', KEYS[1], 'seeded')

-- Mark the durable counters of a subject to be derived again, because their source has changed.
--
-- The version increases, so counters whose derivation is in progress are not written.
--
-- KEYS[1] account
-- Output 1 if it was seeded, else 0
redis.call('HINCRBY', KEYS[1], 'v', 1)
redis.call('PEXPIRE', KEYS[1], 3456000000)
return redis.call('HDEL', KEYS[1], 'seeded')

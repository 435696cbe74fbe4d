-- Mark the durable counters of a subject to be derived again, because their source has changed.
--
-- The version increases, so counters whose derivation is in progress are not written.
--
-- KEYS account
-- Output 1 if it was seeded, else 0
-- @include server
-- @include accounts
local account = unpack(KEYS, 1, 1)
return derive_again(account)

-- Renew the lease of a reservation for another gateway, which resumes the request.
--
-- The previous gateway may only be disconnected, and come back later: its end leaves a mark (see
-- quota_end).
--
-- KEYS reservation, open_reservations
-- ARGV running_prefix, id, lease_ms, record: draft of the usage record, with which a sweep settles
--   the reservation from now on
-- Output the completion tokens that are reserved, or -1 if there is no such reservation
-- @include renewing
-- @include amounts
local reservation, open_reservations = unpack(KEYS, 1, 2)
local running_prefix, id, lease_ms, record = unpack(ARGV, 1, 4)
local request, amounts = unpack(call('HMGET', reservation, 'request', 'amounts'))
if not request then return -1 end
write_if_full(open_reservations)
call('HSET', reservation, 'record', record, 'taken', 1)
renew(open_reservations, running_prefix, id, request, now_ms() + lease_ms)
return select(5, read_amounts(amounts))

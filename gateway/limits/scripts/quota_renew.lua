-- Renew the leases of reservations, so that they still count as concurrent requests.
--
-- KEYS open_reservations
-- ARGV prefixes of reservations and running requests, lease_ms, then request ids
-- Output the request ids without a reservation
-- @include renewing
local open_reservations = unpack(KEYS, 1, 1)
local reservation_prefix, running_prefix, lease_ms = unpack(ARGV, 1, 3)
local first_id, expiry, unknown = 4, now_ms() + lease_ms, {}
write_if_full(open_reservations)
for i = first_id, #ARGV do
  local created_ms, request = unpack(
    call('HMGET', reservation_prefix .. ARGV[i], 'created_ms', 'request'))
  if created_ms then
    renew(open_reservations, running_prefix, ARGV[i], request, expiry)
  else
    unknown[#unknown + 1] = ARGV[i]
  end
end
return unknown

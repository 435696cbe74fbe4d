-- Renew the leases of running requests, so that they still count as concurrent requests.
--
-- Those that have ended, or that another gateway owns, stay as they are.
--
-- KEYS open_requests
-- ARGV prefixes of records and running requests, lease_ms, owner, then request ids
-- Output the request ids without a record
-- @include states
-- @include renewing
local open_requests = unpack(KEYS, 1, 1)
local record_prefix, running_prefix, lease_ms, owner = unpack(ARGV, 1, 4)
local first_id, expiry, unknown = 5, now_ms() + lease_ms, {}
write_if_full(open_requests)
for i = first_id, #ARGV do
  local created_ms, state, known_owner, request = unpack(
    call('HMGET', record_prefix .. ARGV[i], 'created_ms', 'state', 'owner', 'request'))
  local found = state_of(created_ms, state)
  if may('renew', found, known_owner, owner) then
    renew(open_requests, running_prefix, ARGV[i], request, expiry)
  elseif found == ABSENT then
    unknown[#unknown + 1] = ARGV[i]
  end
end
return unknown

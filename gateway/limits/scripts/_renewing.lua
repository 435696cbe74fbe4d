-- Renews the lease of a reservation, so that it still counts as a concurrent request.
-- @include server

local function renew(open_requests, running_prefix, id, request, expiry)
  call('ZADD', open_requests, expiry, id)
  local names, _, _, slots_held = unpack(request and cmsgpack.unpack(request) or {{}})
  for number, name in ipairs(names) do
    if string.sub(slots_held, number, number) == '1' then
      call('ZADD', running_prefix .. name, expiry, id)
    end
  end
end

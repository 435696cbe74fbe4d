-- Find out which of some open requests are those of a tenant.
--
-- KEYS open requests, which all are in one bucket
-- ARGV record_prefix, subject: of the tenant, then request ids
-- Output {request id, creation in Unix milliseconds, ...}
-- @include server
local record_prefix, subject = unpack(ARGV, 1, 2)
local first_id, out = 3, {}
for i = first_id, #ARGV do
  local created_ms, request = unpack(
    call('HMGET', record_prefix .. ARGV[i], 'created_ms', 'request'))
  for _, name in ipairs(request and cmsgpack.unpack(request)[1] or {}) do
    if name == subject then out[#out + 1], out[#out + 2] = ARGV[i], created_ms end
  end
end
return out

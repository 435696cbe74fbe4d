-- Find out which of some open reservations are those of a tenant.
--
-- KEYS[1] open reservations, which all are in one bucket
-- ARGV[1] reservation prefix  ARGV[2] subject of the tenant  ARGV[3..] request ids
-- Output {request id, creation in Unix milliseconds, ...}
local out = {}
for i = 3, #ARGV do
  local fields = redis.call('HMGET', ARGV[1] .. ARGV[i], 'created_ms', 'request')
  if fields[2] then
    for _, name in ipairs(cmsgpack.unpack(fields[2])[1]) do
      if name == ARGV[2] then
        out[#out + 1] = ARGV[i]
        out[#out + 1] = fields[1]
      end
    end
  end
end
return out

-- Renew the leases of reservations, so that they still count as concurrent requests.
--
-- KEYS[1] open reservations
-- ARGV[1] reservation prefix  ARGV[2] running prefix  ARGV[3] lease in milliseconds
-- ARGV[4..] request ids
-- Output the request ids without a reservation
local time = redis.call('TIME')
local expiry = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3])
local unknown = {}
for i = 4, #ARGV do
  local fields = redis.call('HMGET', ARGV[1] .. ARGV[i], 'created_ms', 'request')
  if not fields[1] then
    unknown[#unknown + 1] = ARGV[i]
  else
    redis.call('ZADD', KEYS[1], expiry, ARGV[i])
    local names, _, _, slots_held = unpack(fields[2] and cmsgpack.unpack(fields[2]) or {{}})
    for number, name in ipairs(names) do
      if string.sub(slots_held, number, number) == '1' then
        redis.call('ZADD', ARGV[2] .. name, expiry, ARGV[i])
      end
    end
  end
end
return unknown

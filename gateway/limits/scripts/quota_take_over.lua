-- Renew the lease of a reservation for another gateway, which resumes the request.
--
-- The previous gateway may only be disconnected, and come back later: its end leaves a mark (see
-- quota_end).
--
-- KEYS[1] reservation  KEYS[2] open reservations
-- ARGV[1] running prefix  ARGV[2] request id  ARGV[3] lease in milliseconds
-- ARGV[4] draft of the usage record, with which a sweep settles it from now on
-- Output 1, or 0 if there is no such reservation
local request = redis.call('HGET', KEYS[1], 'request')
if not request then return 0 end
local time = redis.call('TIME')
local expiry = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3])
redis.call('HSET', KEYS[1], 'record', ARGV[4], 'taken', 1)
redis.call('ZADD', KEYS[2], expiry, ARGV[2])
local names, _, _, slots_held = unpack(cmsgpack.unpack(request))
for number, name in ipairs(names) do
  if string.sub(slots_held, number, number) == '1' then
    redis.call('ZADD', ARGV[1] .. name, expiry, ARGV[2])
  end
end
return 1

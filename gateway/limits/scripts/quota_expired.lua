-- Find open reservations whose lease has expired.
--
-- They stay unchanged until they are settled.
--
-- KEYS[1] open reservations
-- ARGV[1] reservation prefix  ARGV[2] maximum number of reservations
-- ARGV[3] how many to skip, longest expired first
-- Output {request id, creation in Unix milliseconds, draft of the usage record, expiry of the lease
--   in Unix milliseconds, ...}, longest expired first
local time = redis.call('TIME')
local now = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
local out = {}
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'WITHSCORES', 'LIMIT', ARGV[3], ARGV[2])
for i = 1, #found, 2 do
  local id, expiry = found[i], found[i + 1]
  local fields = redis.call('HMGET', ARGV[1] .. id, 'created_ms', 'record')
  if fields[1] then
    out[#out + 1] = id
    out[#out + 1] = fields[1]
    out[#out + 1] = fields[2]
    out[#out + 1] = expiry
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
return out

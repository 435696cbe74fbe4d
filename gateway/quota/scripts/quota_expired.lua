-- Find reservations whose lease ran out: nobody has renewed or ended them.
--
-- They stay as they are until somebody settles them.
--
-- KEYS[1] open reservations
-- ARGV[1] prefix of the bucket's keys  ARGV[2] most reservations
-- Output {request id, created in Unix milliseconds, draft of the usage record, ...}, longest expired first
local time = redis.call('TIME')
local now = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
local out = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2])) do
  local fields = redis.call('HMGET', ARGV[1] .. 'reservation:' .. id, 'created_ms', 'record')
  if fields[1] then
    out[#out + 1] = id
    out[#out + 1] = fields[1]
    out[#out + 1] = fields[2]
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
return out

-- Drop receipts that their gateway has settled. A job that has not ended yet will leave none.
--
-- KEYS[1..] jobs
-- Output how many receipts were dropped
local dropped = 0
for _, key in ipairs(KEYS) do
  local state = redis.call('HMGET', key, 'worker', 'ended')
  if state[2] then
    dropped = dropped + redis.call('DEL', key)
  elseif state[1] then
    redis.call('HSET', key, 'settled', 1)
  end
end
return dropped

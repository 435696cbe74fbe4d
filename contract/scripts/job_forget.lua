-- Drop receipts that their gateway has settled. A job that has not ended yet will leave none.
--
-- KEYS jobs
-- Output how many receipts were dropped
local dropped = 0
for _, key in ipairs(KEYS) do
  local worker, ended = unpack(redis.call('HMGET', key, 'worker', 'ended'))
  if ended then
    dropped = dropped + redis.call('DEL', key)
  elseif worker then
    redis.call('HSET', key, 'settled', 1)
  end
end
return dropped

-- Drop receipts that their gateway has settled. A job that has not ended yet will leave none.
--
-- KEYS jobs
-- Output how many receipts were dropped
local call, ended = redis.call, {}
for i = 1, #KEYS do
  local worker, has_ended = unpack(call('HMGET', KEYS[i], 'worker', 'ended'))
  if has_ended then
    ended[#ended + 1] = KEYS[i]
  elseif worker then
    call('HSET', KEYS[i], 'settled', 1)
  end
end
return #ended > 0 and call('DEL', unpack(ended)) or 0

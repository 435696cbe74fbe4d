-- Promises: the retry times of rejected requests.
--
-- Promises are spaced by the pace of claims. Places are held for promises that are about to be due,
-- up to half of the queue. A request that arrives when a promise is due takes that promise; other
-- requests are rejected until then. Requests are thus served in the order in which they first
-- arrived, and clients that retry too often gain nothing.
-- @include server

local least_promised_ms, most_promised_ms, promise_grace_ms = 1000, 60000, 2000

-- Return claims per millisecond, the gap between claim calls in milliseconds, and the seconds of
-- measurement. The gap is the mean over time, computed from the squares: the mean length of the gap
-- that contains a random moment. Calls come in bursts when many sequences end at once, so this is
-- much longer than the mean over calls.
local function pace_of(key)
  local claims, squares, seconds = unpack(call('HMGET', key, 'claims', 'squares', 'seconds'))
  claims, seconds = tonumber(claims or '0'), tonumber(seconds or '0')
  if claims == 0 then return nil, 0, 0 end
  return claims / math.max(seconds, 1) / 1000, (squares or 0) / math.max(seconds, 0.001) * 1000,
    seconds
end

-- Promise places for the jobs of a request, at a pace, in the set of promises of the pace's key.
-- Return after how many milliseconds to retry; 0 if the pace is unknown. Claims come in bursts, so a
-- promised place is free one gap after its computed time.
local function promise(pace, promises, id, number, now, rate, gap)
  if not rate then return 0 end
  local soonest = now + math.max(least_promised_ms - gap, 0)
  local given = math.max(tonumber(call('HGET', pace, 'given') or '0'), soonest) + number / rate
  local due = given + gap
  if due > now + most_promised_ms then return most_promised_ms end
  call('HSET', pace, 'given', string.format('%.3f', given))
  local due_at = string.format('%.3f', due)
  for i = 1, number do call('ZADD', promises, due_at, id .. ' ' .. i) end
  call('PEXPIRE', promises, most_promised_ms + promise_grace_ms)
  return math.ceil(due - now)
end

-- Return the places of a queue of `most` that are held for other requests than one with this number
-- of jobs. It is 0 for a request that takes a due promise. The promise is then used up, whether the
-- request finds room or not.
local function held_places(pace, promises, number, most, now)
  call('ZREMRANGEBYSCORE', promises, '-inf', now - promise_grace_ms)
  local due = call('ZRANGEBYSCORE', promises, '-inf', now, 'LIMIT', 0, number)
  if #due > 0 then
    call('ZREM', promises, unpack(due))
    return 0
  end
  local _, gap = pace_of(pace)
  return math.min(call('ZCOUNT', promises, '-inf', now + gap), math.floor(most / 2))
end

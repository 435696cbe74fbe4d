-- The pace of claims. It is measured while jobs wait: claims, seconds, and squares of the seconds
-- between two calls. All three decay exponentially. When a new backlog starts, they are scaled down
-- to one second of measurement.
-- @include server

local memory_seconds, pace_expiry_ms = 30, 600000

local function note_pace(key, now, number, has_more)
  local claims, squares, seconds, at = unpack(
    call('HMGET', key, 'claims', 'squares', 'seconds', 'at'))
  claims, squares, seconds = claims or 0, squares or 0, tonumber(seconds or '0')
  if at then
    local passed = math.max(now - at, 0) / 1000
    local kept = math.exp(-passed / memory_seconds)
    claims, squares = claims * kept + number, squares * kept + passed ^ 2
    seconds = seconds * kept + passed
  elseif not has_more then
    return
  else
    local kept = 1 / math.max(seconds, 1)
    claims, squares, seconds = claims * kept, squares * kept, seconds * kept
  end
  call('HSET', key, 'claims', string.format('%.6f', claims),
    'squares', string.format('%.9f', squares), 'seconds', string.format('%.6f', seconds),
    'at', string.format('%.0f', now))
  call('PEXPIRE', key, pace_expiry_ms)
  if not has_more then call('HDEL', key, 'at', 'given') end
end

-- The Redis server: its commands and its clock.

-- Globals are slow to look up.
local call = redis.call

-- Return Unix time in milliseconds.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

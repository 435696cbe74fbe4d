-- The Redis server: its commands and its clock.

-- Globals are slow to look up.
local call = redis.call

-- Let the script write while the memory of Redis is full, for what must not be refused then. Redis
-- refuses only the first write of a script, and no command that can only free memory.
local function write_if_full(sorted_set) call('ZREM', sorted_set, '') end

-- Return Unix time in milliseconds.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

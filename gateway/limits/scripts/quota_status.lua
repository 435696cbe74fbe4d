-- Return the usage of subjects, without changes.
--
-- KEYS for each subject: window, running, account
-- Output {ms, for each subject: requests, prompt and completion tokens of the last minute, ms until
--   the oldest of them leave (-1: no usage), concurrent requests, then of the account as strings or
--   nothing: seeded, version, packed numbers (see `gateway.limits.accounts`)}
local MINUTE_SLOTS, SLOT_MS = 240, 250
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local slot = math.floor(now / SLOT_MS)
local out = {now}
for i = 1, #KEYS, 3 do
  local fields, r, p, c, oldest = redis.call('HGETALL', KEYS[i]), 0, 0, 0, nil
  local account = redis.call('HMGET', KEYS[i + 2], 'seeded', 'v', 'n', 'w')
  if account[4] then
    local _, _, _, _, current, sr, sp, sc = struct.unpack('>dddddddd', account[4])
    fields[#fields + 1] = current
    fields[#fields + 1] = string.format('%d %d %d', sr, sp, sc)
  end
  for at = 1, #fields, 2 do
    local number = tonumber(fields[at])
    if number and number >= slot - MINUTE_SLOTS and number <= slot then
      local slot_r, slot_p, slot_c = string.match(fields[at + 1], '(%d+) (%d+) (%d+)')
      r, p, c = r + slot_r, p + slot_p, c + slot_c
      -- A slot whose requests were all released is empty.
      if slot_r ~= '0' and (not oldest or number < oldest) then oldest = number end
    end
  end
  local reset = oldest and (oldest + MINUTE_SLOTS + 1) * SLOT_MS - now or -1
  local running = redis.call('ZCOUNT', KEYS[i + 1], '(' .. string.format('%d', now), '+inf')
  for _, value in ipairs({r, p, c, reset, running}) do out[#out + 1] = value end
  account[4] = nil
  out[#out + 1] = account
end
return out

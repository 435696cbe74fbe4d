-- Return the usage of subjects, without changes.
--
-- KEYS for each subject: window, running, account
-- Output {ms, for each subject: requests, prompt and completion tokens of the last minute, ms until
--   the oldest of them leave (-1: no usage), concurrent requests, then of the account as strings or
--   nothing: seeded, version, packed numbers, packed audio (see `gateway.limits.counters`)}
-- @include server
-- @include minute
local now = now_ms()
local slot = math.floor(now / SLOT_MS)
local out = {now}
for i = 1, #KEYS, 3 do
  local window, running, account = unpack(KEYS, i, i + 2)
  local fields, r, p, c, oldest = call('HGETALL', window), 0, 0, 0, nil
  local seeded, version, numbers, audio, minute = unpack(
    call('HMGET', account, 'seeded', 'v', 'n', 'a', 'w'))
  if minute then
    local m = read_minute(minute)
    fields[#fields + 1] = m.slot
    fields[#fields + 1] = string.format('%d %d %d', m.sr, m.sp, m.sc)
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
  local concurrent = call('ZCOUNT', running, string.format('(%d', now), '+inf')
  for _, value in ipairs({r, p, c, reset, concurrent, {seeded, version, numbers, audio}}) do
    out[#out + 1] = value
  end
end
return out

-- Moves the window of the last minute to the current slot.
-- @include server
-- @include minute

-- More slots than this are found by reading the names of a window's fields.
local FEW_SLOTS, WINDOW_MS = 16, 62000

-- Remove the slots that have left a window from it and from the sums.
local function trim(key, m, oldest)
  local gone = {}
  if oldest - m.head <= FEW_SLOTS then
    for number = m.head, oldest - 1 do gone[#gone + 1] = string.format('%d', number) end
  else
    for _, name in ipairs(call('HKEYS', key)) do
      if tonumber(name) < oldest then gone[#gone + 1] = name end
    end
  end
  m.head = oldest
  if #gone == 0 then return end
  for _, share in ipairs(call('HMGET', key, unpack(gone))) do
    if share then
      local r, p, c = string.match(share, '(%d+) (%d+) (%d+)')
      m.r, m.p, m.c = m.r - r, m.p - p, m.c - c
    end
  end
  call('HDEL', key, unpack(gone))
end

-- Return the numbers of the last minute, with this slot as the current one, and whether they have
-- changed.
local function load_minute(key, packed, slot)
  local oldest, m = slot - MINUTE_SLOTS, packed and read_minute(packed)
  -- No slot counts any more, or the clock moved back by more than a minute.
  if m and (m.slot < oldest or m.head - slot > MINUTE_SLOTS) then
    call('DEL', key)
    m = nil
  end
  if not m then
    return {r = 0, p = 0, c = 0, head = slot, slot = slot, sr = 0, sp = 0, sc = 0}, false
  end
  if m.head < oldest then trim(key, m, oldest) end
  local has_moved = m.head == oldest or m.slot ~= slot
  if m.slot ~= slot then
    call('HSET', key, string.format('%d', m.slot),
      string.format('%d %d %d', m.sr, m.sp, m.sc))
    call('PEXPIRE', key, WINDOW_MS)
    m.slot, m.sr, m.sp, m.sc = slot, 0, 0, 0
    -- After the clock has moved back, this slot may have numbers.
    local share = call('HGET', key, string.format('%d', slot))
    if share then
      m.sr, m.sp, m.sc = string.match(share, '(%d+) (%d+) (%d+)')
      call('HDEL', key, string.format('%d', slot))
    end
  end
  m.head = math.min(m.head, slot)
  return m, has_moved
end

-- Return the milliseconds until slots with `need` of one number (requests, tokens, prompt or
-- completion tokens) have left the window: a slot counts until a minute after its end.
local function window_wait(key, m, limit, need, now)
  local shares, fields = {}, call('HGETALL', key)
  for i = 1, #fields, 2 do shares[fields[i]] = fields[i + 1] end
  shares[string.format('%d', m.slot)] = string.format('%d %d %d', m.sr, m.sp, m.sc)
  for number = m.head, m.slot do
    local share = shares[string.format('%d', number)]
    if share then
      local r, p, c = string.match(share, '(%d+) (%d+) (%d+)')
      need = need - ({r, p + c, p, c})[limit]
      if need <= 0 then return (number + MINUTE_SLOTS + 1) * SLOT_MS - now end
    end
  end
  return (MINUTE_SLOTS + 1) * SLOT_MS
end

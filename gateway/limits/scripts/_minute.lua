-- Usage of the last minute, in slots of 250 ms. A subject's account has, packed into doubles:
--   r, p, c: requests, prompt and completion tokens of the last minute
--   head: the slot before which nothing counts  slot: the current one  sr, sp, sc: its numbers
-- The subject's window has the numbers of earlier slots.
-- @include server

local MINUTE_SLOTS, SLOT_MS, MINUTE = 240, 250, '>dddddddd'

local function read_minute(packed)
  local r, p, c, head, slot, sr, sp, sc = struct.unpack(MINUTE, packed)
  return {r = r, p = p, c = c, head = head, slot = slot, sr = sr, sp = sp, sc = sc}
end

local function pack_minute(m)
  return struct.pack(MINUTE, m.r, m.p, m.c, m.head, m.slot, m.sr, m.sp, m.sc)
end

-- Return the packed minute after its numbers in a slot have changed by these differences; nil if
-- the slot has left the window.
local function change_slot(key, packed, at, requests, prompt, completion)
  local max, r, p, c, head, slot, sr, sp, sc = math.max, struct.unpack(MINUTE, packed)
  local old_r, old_p, old_c, share = sr, sp, sc, nil
  if slot ~= at then
    share = call('HGET', key, string.format('%d', at))
    if not share then return nil end
    old_r, old_p, old_c = string.match(share, '(%d+) (%d+) (%d+)')
  end
  local new_r, new_p, new_c = max(old_r + requests, 0), max(old_p + prompt, 0),
    max(old_c + completion, 0)
  if share then
    call('HSET', key, string.format('%d', at), string.format('%d %d %d', new_r, new_p, new_c))
  else
    sr, sp, sc = new_r, new_p, new_c
  end
  return struct.pack(MINUTE, r + new_r - old_r, p + new_p - old_p, c + new_c - old_c, head, slot,
    sr, sp, sc)
end

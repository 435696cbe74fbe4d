-- What a reservation holds, packed into big-endian doubles.

local AMOUNTS = '>ddddddd'

-- Return the slot, day, month, prompt and completion tokens, cost, and seconds of audio, which
-- reservations of release 0.3.0 lack.
local function read_amounts(packed)
  if #packed < 56 then packed = packed .. struct.pack('>d', 0) end
  return struct.unpack(AMOUNTS, packed)
end

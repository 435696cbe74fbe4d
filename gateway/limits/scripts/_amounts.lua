-- What a reservation holds, packed into big-endian doubles. The slot is the one of the last
-- extension. For each earlier slot, from the one of the admission on, the slot follows and how many
-- completion tokens the reservation held then.

local AMOUNTS, EARLIER, FIRST_EARLIER = '>ddddddd', '>dd', 57

-- Return the slot, day, month, prompt and completion tokens, cost, and seconds of audio.
local function read_amounts(packed) return struct.unpack(AMOUNTS, packed) end

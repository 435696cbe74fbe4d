-- The slots of a minute in which an extended reservation took completion tokens.
-- @include amounts
-- @include minute

-- Return the earlier slots of a reservation that is extended in this slot. Of those that have left
-- the window, the last one is kept.
local function earlier_of(amounts, slot)
  local held_slot, _, _, _, held_completion = read_amounts(amounts)
  local earlier = string.sub(amounts, FIRST_EARLIER)
  if held_slot ~= slot then
    earlier = earlier .. struct.pack(EARLIER, held_slot, held_completion)
  end
  while #earlier > 16 and struct.unpack('>d', earlier, 17) < slot - MINUTE_SLOTS do
    earlier = string.sub(earlier, 17)
  end
  return earlier
end

-- Return how the end of a reservation changes the slots in which it took something: each slot with
-- the differences of requests, prompt and completion tokens. The latest completion tokens are taken
-- back first.
local function changes_of(e)
  local slot, _, _, held_prompt, held_completion = unpack(e.held)
  local changes, before = {}, 0
  for at = FIRST_EARLIER, #e.amounts, 16 do
    local earlier, upto = struct.unpack(EARLIER, e.amounts, at)
    changes[#changes + 1] = {earlier, 0, 0,
      math.max(math.min(e.completion, upto), before) - upto}
    before = upto
  end
  changes[#changes + 1] = {slot, 0, 0, math.max(e.completion, before) - held_completion}
  changes[1][2], changes[1][3] = e.requests - 1, e.prompt - held_prompt
  return changes
end

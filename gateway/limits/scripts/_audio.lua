-- The seconds of audio of a subject's day, in the field `a` of its account. They are apart from its
-- packed numbers, so that requests without audio neither read nor write them.
-- @include server

local AUDIO = '>ddd'

-- Return a day, its settled seconds, and those that open requests hold; zeros if the stored day
-- has ended.
local function read_audio(packed, day)
  if packed then
    local known, settled, held = struct.unpack(AUDIO, packed)
    if known >= day then return known, settled, held end
  end
  return day, 0, 0
end

-- Return the seconds of a day, settled and held.
local function audio_of(key, day)
  local known, settled, held = read_audio(call('HGET', key, 'a'), day)
  return known == day and settled + held or 0
end

-- Write the seconds of a day.
local function write_audio(key, day, settled, held)
  call('HSET', key, 'a', struct.pack(AUDIO, day, settled, held))
end

-- Add to the settled and held seconds of a day, unless a later one has begun.
local function add_audio(key, day, settled, held)
  local known, old_settled, old_held = read_audio(call('HGET', key, 'a'), day)
  if known == day then
    write_audio(key, day, old_settled + settled, math.max(old_held + held, 0))
  end
end

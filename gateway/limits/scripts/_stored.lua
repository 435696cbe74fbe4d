-- Bytes that Redis stores for requests: for each subject, sums of what expires together.
--
-- The record of a request says how many bytes count for it, until when and for whom. So a script that
-- ends or deletes a request changes the sums, too.
-- @include states

local EXPIRED_AT_ONCE, SLOTS = 200, 64
-- Of the mark of a deleted request: `RESPONSE_BYTES` of gateway.completions.stored.store.
local MARK_BYTES = 2048

local function integer(value) return string.format('%d', value) end

-- Return the time until which bytes count that live for so long. It is rounded up by at most a
-- sixty-fourth of that, so that a subject has few sums.
local function slot_of(now, live_ms)
  local _, exponent = math.frexp(math.max(live_ms, SLOTS) / SLOTS)
  local width = 2 ^ (exponent - 1)
  return integer(math.ceil((now + live_ms) / width) * width)
end

-- Return the bytes that count for a request from its end on; none if that does not change.
local function bytes_of_ended(state, bytes, kept, earlier, index)
  if state == '' or state == RELEASED then
    bytes = 0
  elseif state == DELETED then
    bytes = index and MARK_BYTES or 0
  elseif kept and earlier then
    bytes = bytes or tonumber(string.match(earlier, '%d+$'))
  end
  return (earlier or bytes ~= 0) and bytes or nil
end

local function add_stored(s, slot, bytes)
  s.sum, s.is_changed = s.sum + bytes, true
  if call('HINCRBY', s.bytes, slot, integer(bytes)) <= 0 then
    call('HDEL', s.bytes, slot)
    call('ZREM', s.ends, slot)
  elseif bytes > 0 then
    call('ZADD', s.ends, slot, slot)
  end
end

local function load_stored(ends, bytes, now)
  local s = {ends = ends, bytes = bytes, before = 0}
  s.sum = tonumber(call('HGET', bytes, '') or '0')
  for _, slot in ipairs(call('ZRANGEBYSCORE', ends, '-inf', integer(now), 'LIMIT', 0,
    EXPIRED_AT_ONCE)) do
    s.sum, s.is_changed = s.sum - tonumber(call('HGET', bytes, slot) or '0'), true
    call('HDEL', bytes, slot)
    call('ZREM', ends, slot)
  end
  return s
end

local function save_stored(s)
  if not s.is_changed then return end
  local last = call('ZREVRANGE', s.ends, 0, 0)[1]
  if not last then
    call('DEL', s.ends, s.bytes)
    s.sum = 0
    return
  end
  call('HSET', s.bytes, '', integer(s.sum))
  call('PEXPIREAT', s.ends, integer(last + 1000))
  call('PEXPIREAT', s.bytes, integer(last + 1000))
end

-- Let `bytes` count for a record, and for the named subjects, in place of what counted before; with
-- no `bytes`, change nothing. Return the number of the subject whose limit rejects this, or 0, and the
-- bytes of each named subject. Without `limits`, none rejects.
local function count_bytes(record, ends_prefix, bytes_prefix, names, bytes, live_ms, limits)
  local now, loaded, sums, refusing = now_ms(), {}, {}, 0
  local function subject_of(name)
    loaded[name] = loaded[name] or load_stored(ends_prefix .. name, bytes_prefix .. name, now)
    return loaded[name]
  end
  -- First, so that it works while the memory of Redis is full.
  call('HDEL', record, '')
  local earlier, counted = unpack(call('HMGET', record, 'bytes', 'counted'))
  local slot, before = string.match(earlier or '', '(%d+):(%d+)')
  if bytes and slot then
    for _, name in ipairs(cmsgpack.unpack(counted)) do
      local s = subject_of(name)
      -- What has expired does not count any more.
      s.before = call('HEXISTS', s.bytes, slot) == 1 and tonumber(before) or 0
    end
  end
  for number, name in ipairs(names) do
    local s, limit = subject_of(name), limits and tonumber(limits[number])
    if bytes and limit and bytes > s.before and s.sum - s.before + bytes > limit then
      refusing = refusing == 0 and number or refusing
    end
  end
  if bytes and refusing == 0 then
    for _, s in pairs(loaded) do
      if s.before > 0 then add_stored(s, slot, -s.before) end
    end
    if bytes > 0 then
      local new_slot = slot_of(now, live_ms)
      for _, name in ipairs(names) do add_stored(loaded[name], new_slot, bytes) end
      call('HSET', record, 'bytes', new_slot .. ':' .. integer(bytes), 'counted',
        cmsgpack.pack(names))
    elseif slot then
      call('HDEL', record, 'bytes', 'counted')
    end
  end
  for _, s in pairs(loaded) do save_stored(s) end
  for number, name in ipairs(names) do sums[number] = loaded[name].sum end
  return refusing, sums
end

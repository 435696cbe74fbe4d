-- Recompute the amounts that open reservations hold of accounts, and remove concurrent requests
-- without a reservation.
--
-- An account that had no limits when a reservation was made does not include it; the audit adds it.
--
-- KEYS[1] open reservations  KEYS[2] accounts
-- ARGV[1] reservation prefix  ARGV[2] running prefix  ARGV[3] account prefix
-- Output {number of corrected accounts, number of removed concurrent requests}
local reservation_prefix, running_prefix, account_prefix = ARGV[1], ARGV[2], ARGV[3]
local subjects, corrected, removed = {}, 0, 0
local NUMBERS, HELD = '>dddddddddd', {6, 7, 8, 10}

local function account_of(name)
  if not subjects[name] then
    local seen = redis.call('HMGET', account_prefix .. name, 'seeded', 'n')
    local numbers = seen[2] and {struct.unpack(NUMBERS, seen[2])}
      or {0, 0, 0, 0, 0, 0, 0, 0, math.huge, 0}
    subjects[name] = {is_seeded = seen[1], numbers = numbers, known = {0, 0, 0, 0}, late = {0, 0, 0, 0}}
  end
  return subjects[name]
end

local function add(id)
  local key = reservation_prefix .. id
  local fields = redis.call('HMGET', key, 'created_ms', 'request', 'amounts')
  if not fields[1] then
    redis.call('ZREM', KEYS[1], id)
    return
  end
  if not fields[3] then return end
  local request = cmsgpack.unpack(fields[2])
  local names, held_before, is_prepaid = request[1], request[3], request[5]
  local _, day, month, prompt, completion, cost = struct.unpack('>dddddd', fields[3])
  local held = ''
  for i, name in ipairs(names) do
    local a = account_of(name)
    local is_held_before = string.sub(held_before, i, i) == '1'
    local is_held = a.is_seeded or is_held_before
    held = held .. (is_held and '1' or '0')
    if is_held then
      local sums = is_held_before and a.known or a.late
      if a.numbers[1] == day then
        sums[1], sums[2] = sums[1] + 1, sums[2] + prompt + completion
      end
      if a.numbers[2] == month then sums[3] = sums[3] + cost end
      if is_prepaid and string.sub(name, 1, 2) == 't:' then sums[4] = sums[4] + cost end
    end
  end
  if held ~= held_before then
    request[3] = held
    redis.call('HSET', key, 'request', cmsgpack.pack(request))
  end
end

local function is_open(id) return redis.call('EXISTS', reservation_prefix .. id) == 1 end

for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do add(id) end
for _, name in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if redis.call('EXISTS', account_prefix .. name) == 1 then
    account_of(name)
  else
    redis.call('SREM', KEYS[2], name)
  end
end
for name, a in pairs(subjects) do
  local numbers, is_wrong, is_changed = a.numbers, false, false
  for i, place in ipairs(HELD) do
    local sum = a.known[i] + a.late[i]
    if numbers[place] ~= a.known[i] then is_wrong = true end
    if numbers[place] ~= sum then numbers[place], is_changed = sum, true end
  end
  if is_changed then
    redis.call('HSET', account_prefix .. name, 'n', struct.pack(NUMBERS, unpack(numbers, 1, 10)))
  end
  if is_wrong then corrected = corrected + 1 end
  local running = running_prefix .. name
  for _, id in ipairs(redis.call('ZRANGE', running, 0, -1)) do
    if not is_open(id) then
      redis.call('ZREM', running, id)
      removed = removed + 1
    end
  end
end
return {corrected, removed}

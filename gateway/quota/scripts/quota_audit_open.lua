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

local function account_of(name)
  if not subjects[name] then
    local seen = redis.call('HMGET', account_prefix .. name,
      'seeded', 'day', 'month', 'qo', 'to', 'r', 'cr')
    subjects[name] = {seen = seen, known = {0, 0, 0, 0}, late = {0, 0, 0, 0}}
  end
  return subjects[name]
end

local function add(id)
  local key = reservation_prefix .. id
  local fields = redis.call('HMGET', key,
    'subjects', 'held', 'day', 'month', 'prompt', 'completion', 'cost', 'prepaid')
  if not fields[1] then
    redis.call('ZREM', KEYS[1], id)
    return
  end
  local held = ''
  for i, name in ipairs(cmsgpack.unpack(fields[1])) do
    local a = account_of(name)
    local is_held = a.seen[1] or string.sub(fields[2], i, i) == '1'
    held = held .. (is_held and '1' or '0')
    if is_held then
      local sums = string.sub(fields[2], i, i) == '1' and a.known or a.late
      if a.seen[2] == fields[3] then
        sums[1], sums[2] = sums[1] + 1, sums[2] + fields[5] + fields[6]
      end
      if a.seen[3] == fields[4] then sums[3] = sums[3] + fields[7] end
      if fields[8] == '1' and string.sub(name, 1, 2) == 't:' then sums[4] = sums[4] + fields[7] end
    end
  end
  if held ~= fields[2] then redis.call('HSET', key, 'held', held) end
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
  local update, is_wrong = {'HSET', account_prefix .. name}, false
  for i, field in ipairs({'qo', 'to', 'r', 'cr'}) do
    local is = tonumber(a.seen[i + 3] or '0')
    if is ~= a.known[i] then is_wrong = true end
    if is ~= a.known[i] + a.late[i] then
      update[#update + 1] = field
      update[#update + 1] = string.format('%d', a.known[i] + a.late[i])
    end
  end
  if #update > 2 then redis.call(unpack(update)) end
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

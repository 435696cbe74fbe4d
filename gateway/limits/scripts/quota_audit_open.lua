-- Recompute the amounts that open requests hold of accounts, and remove concurrent requests
-- without a reservation.
--
-- An account that had no limits when a reservation was made does not include it; the audit adds it.
--
-- KEYS open_requests, accounts
-- ARGV prefixes of reservations, running requests and accounts
-- Output {number of corrected accounts, number of removed concurrent requests}
-- @include server
-- @include accounts
-- @include audio
-- @include amounts
local open_requests, accounts = unpack(KEYS, 1, 2)
local record_prefix, running_prefix, account_prefix = unpack(ARGV, 1, 3)
local subjects, corrected, removed = {}, 0, 0
local HELD = {'held_requests', 'held_tokens', 'held_cost', 'held_credit', 'held_audio'}

local function account_of(name)
  if not subjects[name] then
    local seeded, packed, audio = unpack(
      call('HMGET', account_prefix .. name, 'seeded', 'n', 'a'))
    local a = read_account(packed)
    a.audio_day, a.audio, a.held_audio = read_audio(audio, a.day)
    subjects[name] = {is_seeded = seeded, numbers = a, known = {0, 0, 0, 0, 0},
      late = {0, 0, 0, 0, 0}}
  end
  return subjects[name]
end

local function add(id)
  local key = record_prefix .. id
  local created_ms, packed, amounts = unpack(
    call('HMGET', key, 'created_ms', 'request', 'amounts'))
  if not created_ms then
    call('ZREM', open_requests, id)
    return
  end
  if not amounts then return end
  local request = cmsgpack.unpack(packed)
  local names, held_before, is_prepaid, spending = request[1], request[3], request[5], request[6]
  local _, day, month, prompt, completion, cost, audio = read_amounts(amounts)
  local held = ''
  for i, name in ipairs(names) do
    local a, bounds, of_name = account_of(name), spending and spending[i], month
    if bounds then of_name = window_at(bounds, math.floor(created_ms / 1000)) or 0 end
    local is_held_before = string.sub(held_before, i, i) == '1'
    local is_held = a.is_seeded or is_held_before
    held = held .. (is_held and '1' or '0')
    if is_held then
      local sums = is_held_before and a.known or a.late
      if a.numbers.day == day then
        sums[1], sums[2] = sums[1] + 1, sums[2] + prompt + completion
      end
      if a.numbers.audio_day == day then sums[5] = sums[5] + audio end
      if a.numbers.month == of_name then sums[3] = sums[3] + cost end
      if is_prepaid and string.sub(name, 1, 2) == 't:' then sums[4] = sums[4] + cost end
    end
  end
  if held ~= held_before then
    request[3] = held
    call('HSET', key, 'request', cmsgpack.pack(request))
  end
end

local function is_open(id) return call('EXISTS', record_prefix .. id) == 1 end

for _, id in ipairs(call('ZRANGE', open_requests, 0, -1)) do add(id) end
for _, name in ipairs(call('SMEMBERS', accounts)) do
  if call('EXISTS', account_prefix .. name) == 1 then
    account_of(name)
  else
    call('SREM', accounts, name)
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
    call('HSET', account_prefix .. name, 'n', pack_account(numbers))
    write_audio(account_prefix .. name, numbers.audio_day, numbers.audio, numbers.held_audio)
  end
  if is_wrong then corrected = corrected + 1 end
  local running = running_prefix .. name
  for _, id in ipairs(call('ZRANGE', running, 0, -1)) do
    if not is_open(id) then
      call('ZREM', running, id)
      removed = removed + 1
    end
  end
end
return {corrected, removed}

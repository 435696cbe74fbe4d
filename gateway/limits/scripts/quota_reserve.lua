-- Admit one request if every limit of its subjects (key, project, tenant) allows it: reserve in all
-- limits or in none.
--
-- For a request that is already admitted, nothing changes and the reply is that of the first call.
-- If the call `extends` the reservation, it becomes as large as asked for, or stays as it is. What is
-- added counts in the current slot of a minute, and in the day and month of the admission.
-- If the counters of an account are incomplete, the script reports it before any decision.
--
-- KEYS reservation, open_reservations
-- ARGV lease_ms: lease in milliseconds  prompt, completion: tokens  audio: its seconds
--   cost: in micro-dollars  record: draft of the usage record  extends: 1 or 0
--   request: msgpack: 1. the names of the subjects  2. `1` for each subject with limits per minute,
--     else `0`  3. the same for subjects with limits per day, a budget or credit  4. the same for
--     limits of concurrent requests  5. whether the tenant is prepaid
--   then for each subject its limits as big-endian doubles, infinite where there is none: requests,
--     tokens, prompt tokens and completion tokens per minute; requests, tokens and seconds of audio
--     per day; concurrent requests; budget
-- Output {1, ms, remaining...} admitted;
--   {-1, ms, limit (1 to 9, or 10: credit), subject, its value, used, ms until it allows the request
--   or -1, remaining...} rejected;
--   {0, subject...} must be seeded first;
--   {-2} released before it arrived, or ended by another process (see quota_end).
--   `ms` is Unix time; `remaining` has for each subject the four per-minute values, budget and
--   credit, -1 where there is no limit
-- @include server
-- @include limits
-- @include amounts
local reservation, open_reservations = unpack(KEYS, 1, 2)
local id, lease_ms, prompt, completion, audio, cost, record, extends, window_prefix,
  running_prefix, account_prefix, request = unpack(ARGV, 1, 12)
local first_limits = 13
-- Globals are slow to look up, and `ipairs` to iterate with.
local format, byte, ONE = string.format, string.byte, string.byte('1')
local created_ms, released = unpack(call('HMGET', reservation, 'created_ms', 'released'))
if released then return {-2} end

prompt, completion, cost = tonumber(prompt), tonumber(completion), tonumber(cost)
audio = tonumber(audio)
local tokens = prompt + completion
local wanted = {1, tokens, prompt, completion, 1, tokens, audio, 1, cost, cost}
local names, windows, held, slots_held, is_prepaid = unpack(cmsgpack.unpack(request))
local now = now_ms()
local slot, day = math.floor(now / SLOT_MS), math.floor(now / DAY_MS)
local month = month_of(day)
local held_day, held_month = day, month
local amounts = created_ms and extends == '1' and call('HGET', reservation, 'amounts')
local is_extended, is_same_day, is_same_month = false, true, true
if amounts then
  local _, held_completion, held_cost
  _, held_day, held_month, prompt, held_completion, held_cost, audio = read_amounts(amounts)
  is_same_day, is_same_month = held_day == day, held_month == month
  local more, dearer = completion - held_completion, cost - held_cost
  is_extended, tokens = more > 0, more
  wanted = {0, more, 0, more, 0, is_same_day and more or 0, 0, 0, is_same_month and dearer or 0,
    dearer}
end

local function load_subject(number)
  local name = names[number]
  local key, window = account_prefix .. name, window_prefix .. name
  local limits = {struct.unpack('>ddddddddd', ARGV[first_limits - 1 + number])}
  limits[CREDIT] = math.huge
  local r, p, c, q, t, seconds, concurrent, s, credit = 0, 0, 0, 0, 0, 0, 0, 0, 0
  local is_minute, is_durable = byte(windows, number) == ONE, byte(held, number) == ONE
  local seeded, packed, old_minute, version, minute, has_moved, account, is_new, is_payer, running
  if is_minute or is_durable then
    seeded, packed, old_minute, version = unpack(call('HMGET', key, 'seeded', 'n', 'w', 'v'))
  end
  if is_minute then
    minute, has_moved = load_minute(window, old_minute, slot)
    r, p, c = minute.r, minute.p, minute.c
  end
  if is_durable then
    is_payer = is_prepaid and string.match(name, '^t:')
    account, is_new = load_account(key, seeded, packed, day, month, is_payer,
      wanted[AUDIO_DAY] > 0)
  end
  if account then
    q, t = account.requests + account.held_requests, account.tokens + account.held_tokens
    s = account.cost + account.held_cost
    if wanted[AUDIO_DAY] > 0 then seconds = audio_of(key, day) end
    if is_payer then limits[CREDIT], credit = account.credit, account.held_credit end
  end
  if byte(slots_held, number) == ONE then
    running = running_prefix .. name
    concurrent = call('ZCARD', running)
    -- Requests whose leases have expired are in the set, but do not count.
    if concurrent >= limits[CONCURRENT] then
      concurrent = call('ZCOUNT', running, format('(%d', now), '+inf')
    end
  end
  return {
    key = key, window = window, limits = limits, minute = minute, has_moved = has_moved,
    used = {r, p + c, p, c, q, t, seconds, concurrent, s, credit}, account = account,
    is_new = is_new, is_payer = is_payer, is_unseeded = is_durable and not account,
    running = running, lasts = packed or old_minute or version
  }
end

-- Return a reply for a request that reserves nothing. Store what has left the windows, and the
-- current slot.
local function unchanged(subjects, reply)
  for _, s in ipairs(subjects) do
    if s.has_moved then call('HSET', s.key, 'w', pack_minute(s.minute)) end
  end
  return reply
end

local subjects, unseeded = {}, {0}
for number = 1, #names do
  local s = load_subject(number)
  subjects[number] = s
  if s.is_unseeded then unseeded[#unseeded + 1] = number end
end
if created_ms and not is_extended then
  local out = {1, tonumber(created_ms)}
  for _, s in ipairs(subjects) do append_remaining(out, s) end
  return unchanged(subjects, out)
end
if #unseeded > 1 then return unchanged(subjects, unseeded) end

local refusal = refusal_of(subjects, wanted, now, day)
if refusal then
  for _, s in ipairs(subjects) do append_remaining(refusal, s) end
  return unchanged(subjects, refusal)
end

-- What the request takes of requests and of prompt tokens is 0 if it is extended.
local out, expiry = {1, tonumber(created_ms or now)}, format('%d', now + lease_ms)
for number = 1, #subjects do
  local s = subjects[number]
  local a, m = s.account, s.minute
  append_remaining(out, s, wanted)
  if a then
    if is_same_day then
      a.held_requests, a.held_tokens = a.held_requests + wanted[1], a.held_tokens + tokens
    end
    if is_same_month then a.held_cost = a.held_cost + wanted[CREDIT] end
    if s.is_payer then a.held_credit = a.held_credit + wanted[CREDIT] end
    if wanted[AUDIO_DAY] > 0 then add_audio(s.key, day, 0, audio) end
  end
  if m then
    m.r, m.p, m.c = m.r + wanted[1], m.p + wanted[3], m.c + wanted[4]
    m.sr, m.sp, m.sc = m.sr + wanted[1], m.sp + wanted[3], m.sc + wanted[4]
  end
  store_numbers(s)
  -- An account in use outlives its numbers if its expiry changes once a day.
  if s.is_new or m and not s.lasts then call('PEXPIRE', s.key, ACCOUNT_MS) end
  if s.running then call('ZADD', s.running, expiry, id) end
end
call('HSET', reservation, 'created_ms', created_ms or format('%d', now), 'request', request,
  'amounts', struct.pack(AMOUNTS, slot, held_day, held_month, prompt, completion, cost, audio),
  'record', record)
call('ZADD', open_reservations, expiry, id)
return out

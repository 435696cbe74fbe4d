-- Admit one request if every limit of its subjects (key, project, tenant) allows it: reserve in all
-- limits or in none.
--
-- For a request that is already admitted, nothing changes and the reply is that of the first call.
-- If the counters of an account are incomplete, the script reports it before any decision.
--
-- A subject's usage is packed into big-endian doubles, in two fields of its account, because fields
-- and texts of numbers cost Redis most of its time: `n`, see `gateway.limits.accounts`, and `w`:
--   requests, prompt and completion tokens of the last minute; the slot before which nothing counts;
--   the current slot; the same three numbers of that slot
-- Those of earlier slots are in the window.
--
-- KEYS[1] reservation  KEYS[2] open reservations
-- ARGV[1] request id  ARGV[2] lease in milliseconds
-- ARGV[3] prompt tokens  ARGV[4] completion tokens  ARGV[5] cost in micro-dollars
-- ARGV[6] draft of the usage record
-- ARGV[7] window prefix  ARGV[8] running prefix  ARGV[9] account prefix
-- ARGV[10] msgpack: 1. the names of the subjects  2. `1` for each subject with limits per minute,
--   else `0`  3. the same for subjects with limits per day, a budget or credit  4. the same for
--   limits of concurrent requests  5. whether the tenant is prepaid
-- ARGV[11..] for each subject its limits as big-endian doubles, infinite where there is none:
--   requests, tokens, prompt tokens and completion tokens per minute; requests and tokens per day;
--   concurrent requests; budget
-- Output {1, ms, remaining...} admitted;
--   {-1, ms, limit (1 to 8, or 9: credit), subject, its value, used, ms until it allows the request
--   or -1, remaining...} rejected;
--   {0, subject...} must be seeded first;
--   {-2} released before it arrived, or ended by another process (see quota_end).
--   `ms` is Unix time; `remaining` has for each subject the four per-minute values, budget and
--   credit, -1 where there is no limit
local MINUTE_SLOTS, SLOT_MS, WINDOW_MS, DAY_MS, NEVER = 240, 250, 62000, 86400000, 2 ^ 53
local ACCOUNT_MS = 3456000000
local REQUESTS_DAY, CONCURRENT, BUDGET, CREDIT = 5, 7, 8, 9
local METERED = {1, 2, 3, 4, BUDGET, CREDIT}
-- More slots than this are found by reading the names of a window's fields.
local FEW_SLOTS = 16
-- Globals are slow to look up, and `ipairs` to iterate with.
local call, match, format, byte = redis.call, string.match, string.format, string.byte
local floor, min, huge = math.floor, math.min, math.huge
local pack, read = struct.pack, struct.unpack
local NUMBERS, MINUTE = '>dddddddddd', '>dddddddd'
local ONE = byte('1')
local known = call('HMGET', KEYS[1], 'created_ms', 'released')
if known[2] then return {-2} end

local id, prompt, completion = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local cost, tokens = tonumber(ARGV[5]), prompt + completion
local wanted = {1, tokens, prompt, completion, 1, tokens, 1, cost, cost}
local names, windows, held, slots_held, is_prepaid = unpack(cmsgpack.unpack(ARGV[10]))
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local slot, day = floor(now / SLOT_MS), floor(now / DAY_MS)

-- The month of a day since 1970 as YYYYMM. Years are counted from March, so that a leap day is last.
local function month_of(number)
  local days = number + 719468
  local left = days % 146097
  local year = floor((left - floor(left / 1460) + floor(left / 36524) - floor(left / 146096)) / 365)
  local of_year = left - 365 * year - floor(year / 4) + floor(year / 100)
  local month = floor((5 * of_year + 2) / 153)
  year = year + 400 * floor(days / 146097)
  return month < 10 and year * 100 + month + 3 or (year + 1) * 100 + month - 9
end
local month, oldest = month_of(day), slot - MINUTE_SLOTS

-- Remove the slots that have left a window from it, and return the sums of the others.
local function trim(key, head, r, p, c)
  local gone = {}
  if oldest - head <= FEW_SLOTS then
    for number = head, oldest - 1 do gone[#gone + 1] = format('%d', number) end
  else
    for _, name in ipairs(call('HKEYS', key)) do
      if tonumber(name) < oldest then gone[#gone + 1] = name end
    end
  end
  if #gone > 0 then
    for _, share in ipairs(call('HMGET', key, unpack(gone))) do
      if share then
        local old_r, old_p, old_c = match(share, '(%d+) (%d+) (%d+)')
        r, p, c = r - old_r, p - old_p, c - old_c
      end
    end
    call('HDEL', key, unpack(gone))
  end
  return r, p, c
end

-- The numbers of the last minute, with this slot as the current one.
local function load_minute(key, packed)
  if not packed then return {r = 0, p = 0, c = 0, head = slot, sr = 0, sp = 0, sc = 0} end
  local r, p, c, head, current, sr, sp, sc = read(MINUTE, packed)
  -- No slot counts any more, or the clock moved back by more than a minute.
  if current < oldest or head - slot > MINUTE_SLOTS then
    call('DEL', key)
    return load_minute(key)
  end
  if head < oldest then
    r, p, c = trim(key, head, r, p, c)
    head = oldest
  end
  if current ~= slot then
    call('HSET', key, format('%d', current), format('%d %d %d', sr, sp, sc))
    call('PEXPIRE', key, WINDOW_MS)
    sr, sp, sc = 0, 0, 0
    -- After the clock has moved back, this slot may have numbers.
    local share = call('HGET', key, format('%d', slot))
    if share then
      sr, sp, sc = match(share, '(%d+) (%d+) (%d+)')
      call('HDEL', key, format('%d', slot))
    end
  end
  return {
    r = r, p = p, c = c, head = min(head, slot), sr = sr, sp = sp, sc = sc,
    has_moved = head == oldest or current ~= slot
  }
end

-- Settled and held amounts of this day and month; nil if they must be derived again.
local function load_account(key, seen, is_payer)
  if not (seen[1] and seen[2]) then return nil end
  local old_day, old_month, q, t, s, qo, to, r, credit, cr = read(NUMBERS, seen[2])
  if old_day > day or old_month > month or (is_payer and credit == huge) then
    call('HDEL', key, 'seeded')
    return nil
  end
  if old_day < day then q, t, qo, to = 0, 0, 0, 0 end
  if old_month < month then s, r = 0, 0 end
  return {
    is_new = old_day ~= day, is_payer = is_payer, q = q, t = t, s = s, qo = qo, to = to, r = r,
    credit = credit, cr = cr
  }
end

local function load_subject(number)
  local name, limits = names[number], {read('>dddddddd', ARGV[10 + number])}
  limits[CREDIT] = huge
  local r, p, c, q, t, running, s, cr = 0, 0, 0, 0, 0, 0, 0, 0
  local minute, account, concurrent, seen
  local key, window = ARGV[9] .. name, ARGV[7] .. name
  local is_minute, is_durable = byte(windows, number) == ONE, byte(held, number) == ONE
  if is_minute or is_durable then seen = call('HMGET', key, 'seeded', 'n', 'w', 'v') end
  if is_minute then
    minute = load_minute(window, seen[3])
    r, p, c = minute.r, minute.p, minute.c
  end
  if is_durable then
    local a = load_account(key, seen, is_prepaid and match(name, '^t:'))
    if a then
      account, q, t, s = a, a.q + a.qo, a.t + a.to, a.s + a.r
      if a.is_payer then limits[CREDIT], cr = a.credit, a.cr end
    end
  end
  if byte(slots_held, number) == ONE then
    concurrent = ARGV[8] .. name
    running = call('ZCARD', concurrent)
    -- Requests whose leases have expired are in the set, but do not count.
    if running >= limits[CONCURRENT] then
      running = call('ZCOUNT', concurrent, format('(%d', now), '+inf')
    end
  end
  return {
    key = key, limits = limits, used = {r, p + c, p, c, q, t, running, s, cr}, window = window,
    minute = minute, is_unseeded = is_durable and not account, account = account,
    running = concurrent, lasts = seen and (seen[2] or seen[3] or seen[4])
  }
end

-- Time until enough slots have left the window: a slot counts until a minute after its end.
local function window_wait(s, limit)
  local shares, need = {}, s.used[limit] + wanted[limit] - s.limits[limit]
  local fields = call('HGETALL', s.window)
  for i = 1, #fields, 2 do shares[fields[i]] = fields[i + 1] end
  local minute = s.minute
  shares[format('%d', slot)] = format('%d %d %d', minute.sr, minute.sp, minute.sc)
  for number = minute.head, slot do
    local share = shares[format('%d', number)]
    if share then
      local r, p, c = match(share, '(%d+) (%d+) (%d+)')
      need = need - ({r, p + c, p, c})[limit]
      if need <= 0 then return (number + MINUTE_SLOTS + 1) * SLOT_MS - now end
    end
  end
  return (MINUTE_SLOTS + 1) * SLOT_MS
end

local function wait_for(s, limit)
  if limit == CREDIT or wanted[limit] > s.limits[limit] then return NEVER end
  if limit < REQUESTS_DAY then return window_wait(s, limit) end
  if limit == CONCURRENT then return -1 end
  local next_day = day + 1
  while limit == BUDGET and month_of(next_day) == month do next_day = next_day + 1 end
  return next_day * DAY_MS - now
end

local function append_remaining(out, s, taken)
  local at, limits, used = #out, s.limits, s.used
  for i = 1, #METERED do
    local limit = METERED[i]
    local left = limits[limit] - used[limit] - taken * wanted[limit]
    out[at + i] = left == huge and -1 or left > 0 and left or 0
  end
end

-- Store what has left the windows, and the current slot, for a request that reserves nothing.
local function save_minutes(subjects)
  for _, s in ipairs(subjects) do
    local m = s.minute
    if m and m.has_moved then
      call('HSET', s.key, 'w', pack(MINUTE, m.r, m.p, m.c, m.head, slot, m.sr, m.sp, m.sc))
    end
  end
end

local subjects, unseeded = {}, {0}
for number = 1, #names do
  local s = load_subject(number)
  subjects[number] = s
  if s.is_unseeded then unseeded[#unseeded + 1] = number end
end
if #unseeded > 1 and not known[1] then
  save_minutes(subjects)
  return unseeded
end

local refusal, longest
if not known[1] then
  for number, s in ipairs(subjects) do
    local limits, used = s.limits, s.used
    for limit = 1, CREDIT do
      local value = limits[limit]
      -- A request that takes nothing of a limit passes, even if the limit is overdrawn.
      if used[limit] + wanted[limit] > value and wanted[limit] > 0 then
        local wait = wait_for(s, limit)
        if not longest or wait > longest then
          local retry_ms = wait < NEVER and wait or -1
          longest, refusal = wait, {-1, now, limit, number, value, used[limit], retry_ms}
        end
      end
    end
  end
end
if refusal then
  save_minutes(subjects)
  for _, s in ipairs(subjects) do append_remaining(refusal, s, 0) end
  return refusal
end

local out = {1, tonumber(known[1] or now)}
for number, s in ipairs(subjects) do
  if s.is_unseeded then
    for _ = 1, #METERED do out[#out + 1] = -1 end
  else
    append_remaining(out, s, known[1] and 0 or 1)
  end
end
if known[1] then
  save_minutes(subjects)
  return out
end

local expiry = format('%d', now + ARGV[2])
for number = 1, #subjects do
  local s = subjects[number]
  local a, m, n, w = s.account, s.minute, nil, nil
  if a then
    n = pack(NUMBERS, day, month, a.q, a.t, a.s, a.qo + 1, a.to + tokens, a.r + cost, a.credit,
      a.is_payer and a.cr + cost or a.cr)
  end
  if m then
    w = pack(MINUTE, m.r + 1, m.p + prompt, m.c + completion, m.head, slot, m.sr + 1,
      m.sp + prompt, m.sc + completion)
  end
  if n and w then
    call('HSET', s.key, 'n', n, 'w', w)
  elseif n or w then
    call('HSET', s.key, n and 'n' or 'w', n or w)
  end
  -- An account in use outlives its numbers if its expiry changes once a day.
  if a and a.is_new or w and not s.lasts then call('PEXPIRE', s.key, ACCOUNT_MS) end
  if s.running then call('ZADD', s.running, expiry, id) end
end
call('HSET', KEYS[1], 'created_ms', format('%d', now), 'request', ARGV[10],
  'amounts', pack('>dddddd', slot, day, month, prompt, completion, cost), 'record', ARGV[6])
call('ZADD', KEYS[2], expiry, id)
return out

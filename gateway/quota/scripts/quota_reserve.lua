-- Admit one request if every limit of its subjects (key, project, tenant) allows it: reserve in all
-- limits or in none.
--
-- For a request that is already admitted, nothing changes and the reply is that of the first call.
-- If the counters of an account are incomplete, the script reports it before any decision.
--
-- KEYS[1] reservation  KEYS[2] open reservations
-- ARGV[1] request id  ARGV[2] lease in milliseconds
-- ARGV[3] prompt tokens  ARGV[4] completion tokens  ARGV[5] cost in micro-dollars
-- ARGV[6] 1 if the tenant is prepaid  ARGV[7] draft of the usage record
-- ARGV[8] window prefix  ARGV[9] running prefix  ARGV[10] account prefix
-- ARGV[11] msgpack: the names of the subjects
-- ARGV[12] 1 for each subject with limits per minute, else 0  ARGV[13] the same for subjects with
--   limits per day, a budget or credit  ARGV[14] the same for limits of concurrent requests
-- ARGV[15..] for each subject its limits as big-endian doubles, infinite where there is none:
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
local floor, huge = math.floor, math.huge
local ONE = byte('1')
local known = call('HMGET', KEYS[1], 'created_ms', 'released')
if known[2] then return {-2} end

local id, prompt, completion = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local cost, tokens, is_prepaid = tonumber(ARGV[5]), prompt + completion, ARGV[6] == '1'
local wanted = {1, tokens, prompt, completion, 1, tokens, 1, cost, cost}
local names, windows, held, slots_held = cmsgpack.unpack(ARGV[11]), ARGV[12], ARGV[13], ARGV[14]
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
local field, day_text, month_text = format('%d', slot), format('%d', day), format('%d', month)

-- Remove the slots that have left a window from it, and return the sums of the others.
local function trim(key, head, r, p, c)
  local gone = {}
  if oldest - head <= FEW_SLOTS then
    for number = head, oldest - 1 do gone[#gone + 1] = format('%d', number) end
  else
    for _, name in ipairs(call('HKEYS', key)) do
      local number = tonumber(name)
      if number and number < oldest then gone[#gone + 1] = name end
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
  call('HSET', key, 'sums', format('%d %d %d %d', r, p, c, oldest))
  return r, p, c
end

-- The sums of the last minute, `head`, and the share of this slot. No slot of a window is older than
-- its `head`, so nothing is removed before that slot is due.
local function load_window(key)
  local seen = call('HMGET', key, 'sums', field)
  if not seen[1] then return 0, 0, 0, slot end
  local r, p, c, head = match(seen[1], '(%d+) (%d+) (%d+) (%d+)')
  r, p, c, head = tonumber(r), tonumber(p), tonumber(c), tonumber(head)
  -- The last case is a clock that moved back by more than a minute: the window is then invalid.
  if slot - head > 2 * MINUTE_SLOTS or head - slot > MINUTE_SLOTS then
    call('DEL', key)
    return 0, 0, 0, slot
  end
  if head < oldest then
    r, p, c = trim(key, head, r, p, c)
    head = oldest
  end
  return r, p, c, head, seen[2]
end

-- Settled and held amounts of this day and month; nil if they must be derived again.
local function load_account(key, is_payer)
  local seen = call('HMGET', key, 'seeded', 'day', 'month', 'q', 't', 's', 'qo', 'to', 'r',
    'credit', 'cr')
  if not seen[1] then return nil end
  local is_new = seen[2] ~= day_text or seen[3] ~= month_text
  if is_new or (is_payer and not seen[10]) then
    local old_day, old_month = tonumber(seen[2]), tonumber(seen[3])
    if old_day > day or old_month > month or (is_payer and not seen[10]) then
      call('HDEL', key, 'seeded')
      return nil
    end
    if old_day < day then seen[4], seen[5], seen[7], seen[8] = 0, 0, 0, 0 end
    if old_month < month then seen[6], seen[9] = 0, 0 end
  end
  return {
    key = key, is_new = is_new, is_payer = is_payer, q = seen[4], t = seen[5], s = seen[6],
    qo = tonumber(seen[7] or 0), to = tonumber(seen[8] or 0), r = tonumber(seen[9] or 0),
    credit = tonumber(seen[10] or 0), cr = tonumber(seen[11] or 0)
  }
end

local function load_subject(number)
  local name, limits = names[number], {struct.unpack('>dddddddd', ARGV[14 + number])}
  limits[CREDIT] = huge
  local r, p, c, q, t, running, s, cr = 0, 0, 0, 0, 0, 0, 0, 0
  local window, head, share, account, concurrent
  if byte(windows, number) == ONE then
    window = ARGV[8] .. name
    r, p, c, head, share = load_window(window)
  end
  local is_durable = byte(held, number) == ONE
  if is_durable then
    local a = load_account(ARGV[10] .. name, is_prepaid and match(name, '^t:'))
    if a then
      account, q, t, s = a, a.q + a.qo, a.t + a.to, a.s + a.r
      if a.is_payer then limits[CREDIT], cr = a.credit, a.cr end
    end
  end
  if byte(slots_held, number) == ONE then
    concurrent = ARGV[9] .. name
    running = call('ZCARD', concurrent)
    -- Requests whose leases have expired are in the set, but do not count.
    if running >= limits[CONCURRENT] then
      running = call('ZCOUNT', concurrent, format('(%d', now), '+inf')
    end
  end
  return {
    limits = limits, used = {r, p + c, p, c, q, t, running, s, cr}, window = window, head = head,
    share = share, is_unseeded = is_durable and not account, account = account, running = concurrent
  }
end

-- Time until enough slots have left the window: a slot counts until a minute after its end.
local function window_wait(s, limit)
  local shares, need = {}, s.used[limit] + wanted[limit] - s.limits[limit]
  local fields = call('HGETALL', s.window)
  for i = 1, #fields, 2 do shares[fields[i]] = fields[i + 1] end
  for number = s.head, slot do
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

local subjects, unseeded = {}, {0}
for number = 1, #names do
  local s = load_subject(number)
  subjects[number] = s
  if s.is_unseeded then unseeded[#unseeded + 1] = number end
end
if #unseeded > 1 and not known[1] then return unseeded end

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
if known[1] then return out end

local expiry = format('%d', now + ARGV[2])
for number = 1, #subjects do
  local s = subjects[number]
  local used, a = s.used, s.account
  if s.window then
    local r, p, c = 0, 0, 0
    if s.share then r, p, c = match(s.share, '(%d+) (%d+) (%d+)') end
    call('HSET', s.window,
      'sums', format('%d %d %d %d', used[1] + 1, used[3] + prompt, used[4] + completion, s.head),
      field, format('%d %d %d', r + 1, p + prompt, c + completion))
    -- Once per slot is enough for a window to outlive its slots.
    if not s.share then call('PEXPIRE', s.window, WINDOW_MS) end
  end
  if a then
    if a.is_new then
      call('HSET', a.key, 'day', day_text, 'q', a.q, 't', a.t, 'month', month_text, 's', a.s)
      call('PEXPIRE', a.key, ACCOUNT_MS)
    end
    if a.is_payer then
      call('HSET', a.key, 'qo', a.qo + 1, 'to', a.to + tokens, 'r', a.r + cost, 'cr', a.cr + cost)
    else
      call('HSET', a.key, 'qo', a.qo + 1, 'to', a.to + tokens, 'r', a.r + cost)
    end
  end
  if s.running then call('ZADD', s.running, expiry, id) end
end
call('HSET', KEYS[1], 'created_ms', now, 'slot', field, 'day', day_text, 'month', month_text,
  'prompt', ARGV[3], 'completion', ARGV[4], 'cost', ARGV[5], 'subjects', ARGV[11],
  'windows', windows, 'held', held, 'slots_held', slots_held, 'prepaid', ARGV[6],
  'record', ARGV[7])
call('ZADD', KEYS[2], expiry, id)
return out

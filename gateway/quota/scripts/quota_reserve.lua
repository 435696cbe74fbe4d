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
-- ARGV[11] msgpack: for each subject its name, then its limits, false where there is none:
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
local REQUESTS_DAY, TOKENS_DAY, CONCURRENT, BUDGET, CREDIT = 5, 6, 7, 8, 9
local METERED = {1, 2, 3, 4, BUDGET, CREDIT}
local id, prompt, completion = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local cost = tonumber(ARGV[5])
local tokens, is_prepaid = prompt + completion, ARGV[6] == '1'
local window_prefix, running_prefix, account_prefix = ARGV[8], ARGV[9], ARGV[10]
local wanted = {1, tokens, prompt, completion, 1, tokens, 1, cost, cost}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local slot, day = math.floor(now / SLOT_MS), math.floor(now / DAY_MS)

-- Every fourth year from 1968 to 2096 is a leap year.
local function calendar()
  local days = day + 731
  local cycle = math.floor(days / 1461)
  local year, left = 1968 + 4 * cycle, days % 1461
  local lengths = {31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31}
  if left >= 366 then
    year, left = year + 1 + math.floor((left - 366) / 365), (left - 366) % 365
    lengths[2] = 28
  end
  local month = 1
  while left >= lengths[month] do
    left, month = left - lengths[month], month + 1
  end
  return year * 100 + month, (day + lengths[month] - left) * DAY_MS
end
local month, next_month_ms = calendar()

local function integer(value) return string.format('%d', value) end

local function parts(text)
  local r, p, c, head = string.match(text, '(%d+) (%d+) (%d+) ?(%d*)')
  return tonumber(r), tonumber(p), tonumber(c), tonumber(head)
end

-- The sums of the last minute and the share of this slot. Older slots are removed from the window.
-- `head` is the oldest slot in the window, so the script scans nothing before that slot is due.
local function load_window(key)
  local field, oldest = integer(slot), slot - MINUTE_SLOTS
  local seen = redis.call('HMGET', key, 'sums', field)
  local r, p, c, head
  if seen[1] then r, p, c, head = parts(seen[1]) end
  -- The last case is a clock that moved back by more than a minute: the window is then invalid.
  if not head or slot - head > 2 * MINUTE_SLOTS or head - slot > MINUTE_SLOTS then
    if head then redis.call('DEL', key) end
    return {key = key, head = slot, field = field, used = {0, 0, 0, 0}}
  end
  if head < oldest then
    local fields, gone = redis.call('HGETALL', key), {}
    head = slot
    for i = 1, #fields, 2 do
      local number = tonumber(fields[i])
      if number and number < oldest then
        local old_r, old_p, old_c = parts(fields[i + 1])
        r, p, c = r - old_r, p - old_p, c - old_c
        gone[#gone + 1] = fields[i]
      elseif number then
        head = math.min(head, number)
      end
    end
    if #gone > 0 then redis.call('HDEL', key, unpack(gone)) end
    redis.call('HSET', key, 'sums', string.format('%d %d %d %d', r, p, c, head))
  end
  return {key = key, head = head, field = field, used = {r, p + c, p, c}, share = seen[2]}
end

-- Settled and held amounts of this day and month; nil if they must be derived again.
local function load_account(key, is_payer)
  local seen = redis.call('HMGET', key,
    'seeded', 'day', 'month', 'q', 't', 's', 'qo', 'to', 'r', 'credit', 'cr')
  if not seen[1] then return nil end
  local old_day, old_month = tonumber(seen[2]), tonumber(seen[3])
  if old_day > day or old_month > month or (is_payer and not seen[10]) then
    redis.call('HDEL', key, 'seeded')
    return nil
  end
  local a = {key = key, is_payer = is_payer, is_new = old_day < day or old_month < month}
  a.credit, a.cr = tonumber(seen[10] or '0'), tonumber(seen[11] or '0')
  if old_day < day then
    a.q, a.t, a.qo, a.to = 0, 0, 0, 0
  else
    a.q, a.t = tonumber(seen[4]), tonumber(seen[5])
    a.qo, a.to = tonumber(seen[7] or '0'), tonumber(seen[8] or '0')
  end
  if old_month < month then
    a.s, a.r = 0, 0
  else
    a.s, a.r = tonumber(seen[6]), tonumber(seen[9] or '0')
  end
  return a
end

local function load_subject(given)
  local name = given[1]
  local s = {name = name, limits = {}, running = running_prefix .. name, used = {}}
  for limit = 1, BUDGET do s.limits[limit] = given[limit + 1] or nil end
  local l = s.limits
  if l[1] or l[2] or l[3] or l[4] then
    s.window = load_window(window_prefix .. name)
    for limit = 1, 4 do s.used[limit] = s.window.used[limit] end
  end
  local is_payer = is_prepaid and string.sub(s.name, 1, 2) == 't:'
  s.is_durable = l[REQUESTS_DAY] or l[TOKENS_DAY] or l[BUDGET] or is_payer
  local a = s.is_durable and load_account(account_prefix .. name, is_payer)
  if a then
    s.account = a
    s.used[REQUESTS_DAY], s.used[TOKENS_DAY], s.used[BUDGET] = a.q + a.qo, a.t + a.to, a.s + a.r
    if is_payer then s.limits[CREDIT], s.used[CREDIT] = a.credit, a.cr end
  end
  if l[CONCURRENT] then
    s.used[CONCURRENT] = redis.call('ZCOUNT', s.running, '(' .. integer(now), '+inf')
  end
  return s
end

-- Time until enough slots have left the window: a slot counts until a minute after its end.
local function window_wait(s, limit)
  local shares, need = {}, s.used[limit] + wanted[limit] - s.limits[limit]
  local fields = redis.call('HGETALL', s.window.key)
  for i = 1, #fields, 2 do shares[fields[i]] = fields[i + 1] end
  for number = s.window.head, slot do
    local share = shares[integer(number)]
    if share then
      local r, p, c = parts(share)
      need = need - ({r, p + c, p, c})[limit]
      if need <= 0 then return (number + MINUTE_SLOTS + 1) * SLOT_MS - now end
    end
  end
  return (MINUTE_SLOTS + 1) * SLOT_MS
end

local function wait_for(s, limit)
  if limit == CREDIT or wanted[limit] > s.limits[limit] then return NEVER end
  if limit < REQUESTS_DAY then return window_wait(s, limit) end
  if limit == BUDGET then return next_month_ms - now end
  if limit == CONCURRENT then return -1 end
  return (day + 1) * DAY_MS - now
end

local function append_remaining(out, s, taken)
  local at, limits, used = #out, s.limits, s.used
  for i, limit in ipairs(METERED) do
    local value = limits[limit]
    out[at + i] = value and math.max(value - used[limit] - taken * wanted[limit], 0) or -1
  end
end

local known = redis.call('HMGET', KEYS[1], 'created_ms', 'released')
if known[2] then return {-2} end
local subjects, unseeded = {}, {0}
for number, given in ipairs(cmsgpack.unpack(ARGV[11])) do
  local s = load_subject(given)
  subjects[number] = s
  if s.is_durable and not s.account then unseeded[#unseeded + 1] = number end
end
if #unseeded > 1 and not known[1] then return unseeded end

local refusal, longest
if not known[1] then
  for number, s in ipairs(subjects) do
    for limit = 1, CREDIT do
      local value = s.limits[limit]
      -- A request that takes nothing of a limit passes, even if the limit is overdrawn.
      if value and wanted[limit] > 0 and s.used[limit] + wanted[limit] > value then
        local wait = wait_for(s, limit)
        if not longest or wait > longest then
          local retry_ms = wait < NEVER and wait or -1
          longest, refusal = wait, {-1, now, limit, number, value, s.used[limit], retry_ms}
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
for _, s in ipairs(subjects) do
  if s.is_durable and not s.account then
    for _ = 1, #METERED do out[#out + 1] = -1 end
  else
    append_remaining(out, s, known[1] and 0 or 1)
  end
end
if known[1] then return out end

local names, windows, slots_held, held = {}, '', '', ''
local expiry = integer(now + ARGV[2])
for number, s in ipairs(subjects) do
  names[number] = s.name
  local w, a = s.window, s.account
  windows = windows .. (w and '1' or '0')
  if w then
    local r, p, c = 0, 0, 0
    if w.share then r, p, c = parts(w.share) end
    redis.call('HSET', w.key,
      'sums', string.format('%d %d %d %d', w.used[1] + 1, w.used[3] + prompt,
        w.used[4] + completion, w.head),
      w.field, string.format('%d %d %d', r + 1, p + prompt, c + completion))
    -- Once per slot is enough for a window to outlive its slots.
    if not w.share then redis.call('PEXPIRE', w.key, WINDOW_MS) end
  end
  held = held .. (a and '1' or '0')
  if a then
    if a.is_new then
      redis.call('HSET', a.key, 'day', day, 'q', a.q, 't', a.t, 'month', month, 's', a.s)
    end
    redis.call('HSET', a.key,
      'qo', integer(a.qo + 1), 'to', integer(a.to + tokens), 'r', integer(a.r + cost),
      'cr', integer(a.cr + (a.is_payer and cost or 0)))
  end
  slots_held = slots_held .. (s.limits[CONCURRENT] and '1' or '0')
  if s.limits[CONCURRENT] then redis.call('ZADD', s.running, expiry, id) end
end
redis.call('HSET', KEYS[1], 'created_ms', integer(now), 'slot', integer(slot), 'day', integer(day),
  'month', integer(month), 'prompt', ARGV[3], 'completion', ARGV[4], 'cost', ARGV[5],
  'subjects', cmsgpack.pack(names), 'windows', windows, 'held', held, 'slots_held', slots_held,
  'prepaid', ARGV[6], 'record', ARGV[7])
redis.call('ZADD', KEYS[2], expiry, id)
return out

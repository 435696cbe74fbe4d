-- The account of a subject: its usage of a day and a month, packed into big-endian doubles in one
-- field, because fields and texts of numbers cost Redis most of its time (see
-- `gateway.limits.counters`). Held amounts are those of open requests.
--
-- A spend limit has an account too. Its month is the second at which its window begins.

local ACCOUNT, ACCOUNT_MS = '>dddddddddd', 3456000000

-- Return the numbers of an account by name; those of a new one if there are none.
local function read_account(packed)
  local day, month, requests, tokens, cost, held_requests, held_tokens, held_cost, credit,
    held_credit = 0, 0, 0, 0, 0, 0, 0, 0, math.huge, 0
  if packed then
    day, month, requests, tokens, cost, held_requests, held_tokens, held_cost, credit, held_credit =
      struct.unpack(ACCOUNT, packed)
  end
  return {
    day = day, month = month, requests = requests, tokens = tokens, cost = cost, credit = credit,
    held_requests = held_requests, held_tokens = held_tokens, held_cost = held_cost,
    held_credit = held_credit
  }
end

local function pack_account(a)
  return struct.pack(ACCOUNT, a.day, a.month, a.requests, a.tokens, a.cost, a.held_requests,
    a.held_tokens, a.held_cost, a.credit, a.held_credit)
end

-- Begin a later day or month. Nothing of an earlier one counts any more.
local function advance(a, day, month)
  if a.day < day then
    a.day, a.requests, a.tokens, a.held_requests, a.held_tokens = day, 0, 0, 0, 0
  end
  if a.month < month then a.month, a.cost, a.held_cost = month, 0, 0 end
end

-- Return the packed account without what the reservation held, and with what is charged for it, and
-- whether that begins a day. Named tables would cost the end of a reservation a tenth of its time.
local function end_in_account(packed, day, month, held_tokens, held_cost, is_held, tokens, cost,
    is_charged, is_payer)
  local max, is_new = math.max, false
  local old_day, old_month, q, t, s, held_q, held_t, held_s, credit, held_credit =
    0, 0, 0, 0, 0, 0, 0, 0, math.huge, 0
  if packed then
    old_day, old_month, q, t, s, held_q, held_t, held_s, credit, held_credit =
      struct.unpack(ACCOUNT, packed)
  end
  if is_held then
    if old_day == day then held_q, held_t = max(held_q - 1, 0), max(held_t - held_tokens, 0) end
    if old_month == month then held_s = max(held_s - held_cost, 0) end
    if is_payer then held_credit = max(held_credit - held_cost, 0) end
  end
  if is_charged then
    is_new = old_day ~= day
    -- Numbers of an older day or month are dropped.
    if old_day < day then old_day, q, t, held_q, held_t = day, 0, 0, 0, 0 end
    if old_day <= day then q, t = q + 1, t + tokens end
    if old_month < month then old_month, s, held_s = month, 0, 0 end
    if old_month <= month then s = s + cost end
    -- What is infinite stays so: no credit is derived.
    if is_payer then credit = credit - cost end
  end
  return struct.pack(ACCOUNT, old_day, old_month, q, t, s, held_q, held_t, held_s, credit,
    held_credit), is_new
end

-- Return when the window of a spend limit begins that contains this second, when the window before
-- began, if that is known, and when it ends; nothing outside the known windows. `bounds` are the
-- beginnings of three windows, and the end of the last one.
local function window_at(bounds, second)
  for i = 3, 1, -1 do
    if second >= bounds[i] then
      if second < bounds[i + 1] then return bounds[i], bounds[i - 1], bounds[i + 1] end
      return nil
    end
  end
end

-- Return how long an account stays: that of a spend limit until its next window ends.
local function stays_ms_of(bounds, now)
  return bounds and math.max(bounds[4] * 1000 - now, 60000) or ACCOUNT_MS
end

-- Return the numbers of an account, which its ending requests change.
local function numbers_of(key)
  local seeded, old, version, packed = unpack(call('HMGET', key, 'seeded', 'n', 'v', 'w'))
  -- All fields at once: a table that grows later costs as much as a command.
  return {
    key = key, seeded = seeded, n = old, v = version, w = packed, ended = {}, has_account = false,
    has_minute = false, is_written = false, expires = false
  }
end

-- Return when the window of a spend limit began in which a request was admitted that has ended.
local function window_of_ended(s, bounds, second)
  local start, known = window_at(bounds, second) or 0, s.n and read_account(s.n).month or 0
  -- The windows of a spend limit move with the time zone of the tenant.
  s.bounds, s.is_moved = bounds, s.is_moved or known > start and second >= known
  return start
end

-- Let the durable counters of an account be derived again. Return 1 if it was seeded, else 0.
local function derive_again(account)
  call('HINCRBY', account, 'v', 1)
  call('PEXPIRE', account, ACCOUNT_MS)
  return call('HDEL', account, 'seeded')
end

-- Limits of a subject, by number: requests, tokens, prompt tokens and completion tokens per minute;
-- requests, tokens and seconds of audio per day; concurrent requests; budget; credit. `s` is the
-- subject: its key, window, limits, what is used of them, minute and account. The credit of a spend
-- limit is its amount, of which each of its windows has all.
-- @include accounts
-- @include audio
-- @include window
-- @include calendar

local REQUESTS_DAY, AUDIO_DAY, CONCURRENT, BUDGET, CREDIT, NEVER = 5, 7, 8, 9, 10, 2 ^ 53
local METERED = {1, 2, 3, 4, BUDGET, CREDIT}

-- Return the account of a day and a month, and whether its day is new; nil if it must be derived
-- again.
local function load_account(key, seeded, packed, day, month, is_payer, month_before)
  if not (seeded and packed and month) then return nil end
  local a = read_account(packed)
  -- The windows of a spend limit move with the time zone of the tenant.
  local is_moved = month_before and a.month < month and a.month > month_before
  if a.day > day or a.month > month or is_moved or (is_payer and a.credit == math.huge) then
    call('HDEL', key, 'seeded')
    return nil
  end
  local is_new = a.day ~= day or a.month ~= month
  advance(a, day, month)
  return a, is_new
end

-- Move the amount of a spend limit to the place of the credit. Return when its current window begins,
-- when the window before began, and when it ends; nothing outside the known windows.
local function begin_window(bounds, second, limits)
  limits[CREDIT], limits[BUDGET] = limits[BUDGET], math.huge
  return window_at(bounds, second)
end

-- Note whether the window is over in which a request was admitted that is extended now.
local function note_over(s, created_ms)
  s.is_over = s.bounds and (not s.start or tonumber(created_ms) < s.start * 1000)
end

-- Return the milliseconds until a limit may allow the request; -1 if that is unknown.
local function wait_for(s, limit, wanted, now, day)
  if wanted > s.limits[limit] then return NEVER end
  if limit == CREDIT then return s.ends and s.ends * 1000 - now or NEVER end
  if limit < REQUESTS_DAY then
    local need = s.used[limit] + wanted - s.limits[limit]
    return window_wait(s.window, s.minute, limit, need, now)
  end
  if limit == CONCURRENT then return -1 end
  return (limit == BUDGET and next_month(day) or day + 1) * DAY_MS - now
end

-- Return the reply for a request that a limit does not allow, the one with the longest wait; nil if
-- all limits allow it.
local function refusal_of(subjects, wanted, now, day)
  local refusal, longest
  for number = 1, #subjects do
    local s = subjects[number]
    local limits, used = s.limits, s.used
    for limit = 1, CREDIT do
      -- A request that takes nothing of a limit passes, even if the limit is overdrawn.
      if used[limit] + wanted[limit] > limits[limit] and wanted[limit] > 0
          and not (limit == CREDIT and s.is_over) then
        local wait = wait_for(s, limit, wanted[limit], now, day)
        if not longest or wait > longest then
          longest = wait
          refusal = {-1, now, limit, number, limits[limit], used[limit], wait < NEVER and wait or -1}
        end
      end
    end
  end
  return refusal
end

-- Store the account and the minute of a subject.
local function store_numbers(s)
  local a, m = s.account, s.minute
  if a and m then
    call('HSET', s.key, 'n', pack_account(a), 'w', pack_minute(m))
  elseif a then
    call('HSET', s.key, 'n', pack_account(a))
  elseif m then
    call('HSET', s.key, 'w', pack_minute(m))
  end
end

-- Reserve what a request wants in the limits of a subject. What is of another day or month than the
-- current one, such as more tokens of an older reservation, does not count in those.
local function reserve(s, wanted, is_same_day, is_same_month)
  local a, m, used = s.account, s.minute, s.used
  for limit = 1, CREDIT do used[limit] = used[limit] + wanted[limit] end
  if s.bounds then is_same_month = not s.is_over end
  if s.is_over then used[CREDIT] = used[CREDIT] - wanted[CREDIT] end
  if a then
    if is_same_day then
      a.held_requests, a.held_tokens = a.held_requests + wanted[1], a.held_tokens + wanted[2]
    end
    if is_same_month then a.held_cost = a.held_cost + wanted[CREDIT] end
    if s.is_payer then a.held_credit = a.held_credit + wanted[CREDIT] end
    s.audio = s.audio + wanted[AUDIO_DAY]
  end
  if m then
    m.r, m.p, m.c = m.r + wanted[1], m.p + wanted[3], m.c + wanted[4]
    m.sr, m.sp, m.sc = m.sr + wanted[1], m.sp + wanted[3], m.sc + wanted[4]
  end
  s.is_changed = true
end

-- Append what is left of the metered limits.
local function append_remaining(remaining, s)
  local at, limits, used = #remaining, s.limits, s.used
  for i = 1, #METERED do
    local limit = METERED[i]
    local left = limits[limit] - used[limit]
    remaining[at + i] = (left == math.huge or s.is_unseeded) and -1 or left > 0 and left or 0
  end
end

-- Write what has changed of a subject; `leases` are those of the requests that were admitted.
local function write_subject(s, now, day, leases)
  if s.is_changed then
    if s.audio > 0 then add_audio(s.key, day, 0, s.audio) end
    store_numbers(s)
    -- An account in use outlives its numbers if its expiry changes once a day.
    if s.is_new or s.minute and not s.lasts then
      call('PEXPIRE', s.key, stays_ms_of(s.bounds, now))
    end
    if s.running then call('ZADD', s.running, unpack(leases)) end
  elseif s.has_moved then
    call('HSET', s.key, 'w', pack_minute(s.minute))
  end
end

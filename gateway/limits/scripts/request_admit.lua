-- Admit requests of the same subjects (key, project, tenant), one after the other: a request is
-- admitted if every limit of its subjects allows it. It reserves in all limits or in none.
--
-- For a request that is already admitted, nothing changes and the reply is that of the first call.
-- If the call `extends` a running request, it holds as much as asked for, or stays as it is. What is
-- added counts in the current slot of a minute, and in the day and month of the admission.
-- If the counters of an account are incomplete, the script reports it before any decision.
--
-- KEYS open_requests, then the record of each request
-- ARGV lease_ms: lease in milliseconds  extends: 1 or 0
--   described: msgpack: 1. the names of the subjects  2. `1` for each subject with limits per minute,
--     else `0`  3. the same for subjects with limits per day, a budget or credit  4. the same for
--     limits of concurrent requests  5. whether the tenant is prepaid  6. for each subject, the
--     beginnings of windows if it is a spend limit, else false; absent if none is
--   then for each subject its limits as big-endian doubles, infinite where there is none: requests,
--     tokens, prompt tokens and completion tokens per minute; requests, tokens and seconds of audio
--     per day; concurrent requests; budget, or the amount of a spend limit
--   then for each request: id, prompt tokens, completion tokens, seconds of audio, cost in
--     micro-dollars, draft of the usage record, msgpack of `Kept` (gateway.limits.replies) or empty
-- Output for each request {1, ms, remaining} admitted;
--   {-1, ms, limit (1 to 9, or 10: credit), subject, its value, used, ms until it allows the request
--   or -1, remaining} rejected;
--   {0, subject...} must be seeded first;
--   {-2} not a transition: nothing to extend, released before, ended, or of another term
--   `ms` is Unix time; `remaining` is msgpack: for each subject the four per-minute values, budget
--   and credit, -1 where there is no limit
-- @include records
-- @include limits
-- @include slices
local open_requests = unpack(KEYS, 1, 1)
local lease_ms, extends, window_prefix, running_prefix, account_prefix, described = unpack(ARGV, 1, 6)
-- Globals are slow to look up, and `ipairs` to iterate with.
local format, byte, ONE = string.format, string.byte, string.byte('1')
local names, windows, held, slots_held, is_prepaid, spending = unpack(cmsgpack.unpack(described))
local first_limits, fields, requests = 7, 7, #KEYS - 1
local first_request = first_limits + #names
local now = now_ms()
local slot, day = math.floor(now / SLOT_MS), math.floor(now / DAY_MS)
local month, expiry, second = month_of(day), format('%d', now + lease_ms), math.floor(now / 1000)

local function load_subject(number, has_audio)
  local name = names[number]
  local key, window = account_prefix .. name, window_prefix .. name
  local limits = {struct.unpack('>ddddddddd', ARGV[first_limits - 1 + number])}
  limits[CREDIT] = math.huge
  local r, p, c, q, t, seconds, concurrent, s, credit = 0, 0, 0, 0, 0, 0, 0, 0, 0
  local is_minute, is_durable = byte(windows, number) == ONE, byte(held, number) == ONE
  local bounds, start, before, ends = spending and spending[number], month, nil, nil
  if bounds then
    start, before, ends = begin_window(bounds, second, limits)
    is_durable = is_durable and (start or extends ~= '1')
  end
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
    account, is_new = load_account(key, seeded, packed, day, start, is_payer, before)
  end
  if account then
    q, t = account.requests + account.held_requests, account.tokens + account.held_tokens
    s = account.cost + account.held_cost
    if has_audio then seconds = audio_of(key, day) end
    if is_payer then limits[CREDIT], credit = account.credit, account.held_credit end
    if bounds then s, credit = 0, s end
  end
  if byte(slots_held, number) == ONE then
    running = running_prefix .. name
    concurrent = call('ZCARD', running)
    -- Requests whose leases have expired are in the set, but do not count.
    if concurrent + requests > limits[CONCURRENT] then
      concurrent = call('ZCOUNT', running, format('(%d', now), '+inf')
    end
  end
  return {
    key = key, window = window, limits = limits, minute = minute, has_moved = has_moved,
    used = {r, p + c, p, c, q, t, seconds, concurrent, s, credit}, account = account,
    is_new = is_new, is_payer = is_payer, is_unseeded = is_durable and not account,
    running = running, lasts = packed or old_minute or version, audio = 0,
    is_changed = false, bounds = bounds, start = start, ends = ends, is_over = false
  }
end

-- Reads come first, so that an error in one of the reservations changes nothing.
local known, has_audio = {}, false
-- One command for keys that usually are absent.
local are_known = call('EXISTS', unpack(KEYS, 2)) > 0
for i = 1, requests do
  known[i] = are_known and call('HMGET', KEYS[i + 1], 'created_ms', 'state', 'term', 'key',
    'bytes', extends == '1' and 'amounts' or '') or {}
  has_audio = has_audio or tonumber(ARGV[first_request + (i - 1) * fields + 3]) > 0
end
local subjects, unseeded, leases, written, admitted = {}, {0}, {}, {}, {}
for number = 1, #names do
  subjects[number] = load_subject(number, has_audio)
  if subjects[number].is_unseeded then unseeded[#unseeded + 1] = number end
end

-- Decide on a request. What it takes of requests and of prompt tokens is 0 if it is extended.
local function decide(i)
  local at = first_request + (i - 1) * fields
  local id, prompt, completion, audio, cost, record, kept = unpack(ARGV, at, at + fields - 1)
  local created_ms, state, known_term, index, bytes, amounts = unpack(known[i])
  kept, state = kept ~= '' and cmsgpack.unpack(kept), state_of(created_ms, state)
  local term = kept and tostring(kept[2])
  if not is_transition(extends == '1', state, known_term, term) then return {-2} end
  if state ~= RUNNING then created_ms = admitted[id] end
  prompt, completion, audio, cost = tonumber(prompt), tonumber(completion), tonumber(audio),
    tonumber(cost)
  local tokens, held_day, held_month, earlier, is_extended = prompt + completion, day, month, '', false
  local wanted = {1, tokens, prompt, completion, 1, tokens, audio, 1, cost, cost}
  if created_ms and amounts then
    local _, held_completion, held_cost
    _, held_day, held_month, prompt, held_completion, held_cost, audio = read_amounts(amounts)
    earlier = earlier_of(amounts, slot)
    for number = 1, #subjects do note_over(subjects[number], created_ms) end
    tokens, is_extended = completion - held_completion, completion > held_completion
    wanted = {0, tokens, 0, tokens, 0, held_day == day and tokens or 0, 0, 0,
      held_month == month and cost - held_cost or 0, cost - held_cost}
  end
  local out = {1, tonumber(created_ms or now)}
  if is_extended or not created_ms then
    if #unseeded > 1 then return unseeded end
    local refusal = refusal_of(subjects, wanted, now, day)
    if refusal then
      out = refusal
    else
      for number = 1, #subjects do
        reserve(subjects[number], wanted, held_day == day, held_month == month)
      end
      admitted[id], leases[#leases + 1], leases[#leases + 2] = now, expiry, id
      written[#written + 1] = {KEYS[i + 1], created_ms or format('%d', now), record,
        struct.pack(AMOUNTS, slot, held_day, held_month, prompt, completion, cost, audio) .. earlier,
        not is_extended and kept, state, index or false, id, bytes}
    end
  end
  local remaining = {}
  for number = 1, #subjects do append_remaining(remaining, subjects[number]) end
  -- One text: Redis and the gateway would spend more on a reply with so many numbers.
  out[#out + 1] = cmsgpack.pack(remaining)
  return out
end

local replies = {}
for i = 1, requests do replies[i] = decide(i) end
for number = 1, #subjects do write_subject(subjects[number], now, day, leases) end
for i = 1, #written do write_record(described, unpack(written[i])) end
if #leases > 0 then call('ZADD', open_requests, unpack(leases)) end
return replies

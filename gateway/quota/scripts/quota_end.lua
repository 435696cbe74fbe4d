-- End a reservation: settle it with the actual usage, or release it as if it had never existed.
--
-- The first end wins. A settlement that finds no reservation (Redis lost it, or it has ended) still
-- appends its record; the ledger keeps one record per request. Since the counters may or may not
-- include that request, the subjects' accounts must be derived again. A release that finds no
-- reservation leaves a mark for a while. The mark rejects a reservation that arrives after its
-- release. An end by any process but the gateway that reserved leaves the mark too, because that
-- gateway may come back and restore a reservation that it considers lost.
--
-- KEYS[1] reservation  KEYS[2] open reservations  KEYS[3] usage records
-- ARGV[1] window prefix  ARGV[2] running prefix  ARGV[3] account prefix
-- ARGV[4] request id  ARGV[5] 1 to settle, 0 to release
-- ARGV[6] prompt tokens  ARGV[7] completion tokens  ARGV[8] cost in micro-dollars; all 0 to release
-- ARGV[9] usage record; empty to release
-- ARGV[10] expiry of the lease, to end the reservation only if it is still open and was not renewed
--   since; or empty
-- ARGV[11..] names of the subjects, if there is no reservation
-- Output 1 if the reservation was open, else 0
local RELEASED_MS, ENDED_MS, ACCOUNT_MS = 120000, 3600000, 3456000000
local window_prefix, running_prefix, account_prefix = ARGV[1], ARGV[2], ARGV[3]
local requests, prompt, completion = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local cost, is_settle = tonumber(ARGV[8]), ARGV[5] == '1'
if ARGV[10] ~= '' then
  local expiry = redis.call('ZSCORE', KEYS[2], ARGV[4]) or '0'
  if tonumber(expiry) ~= tonumber(ARGV[10]) then return 0 end
end
local fields = redis.call('HMGET', KEYS[1],
  'created_ms', 'slot', 'day', 'month', 'prompt', 'completion', 'cost',
  'subjects', 'windows', 'held', 'slots_held', 'prepaid', 'taken')

local function integer(value) return string.format('%d', value) end

if is_settle then redis.call('XADD', KEYS[3], '*', 'u', ARGV[9]) end
if not fields[1] then
  if not is_settle then
    redis.call('HSET', KEYS[1], 'released', 1)
    redis.call('PEXPIRE', KEYS[1], RELEASED_MS)
    return 0
  end
  for i = 11, #ARGV do
    local account = account_prefix .. ARGV[i]
    redis.call('HINCRBY', account, 'v', 1)
    redis.call('HDEL', account, 'seeded')
    redis.call('PEXPIRE', account, ACCOUNT_MS)
  end
  return 0
end

local day, month, is_prepaid = tonumber(fields[3]), tonumber(fields[4]), fields[12] == '1'
local held_prompt, held_completion = tonumber(fields[5]), tonumber(fields[6])
local held_cost = tonumber(fields[7])

-- A missing slot has already left the window.
local function correct_window(key)
  local seen = redis.call('HMGET', key, 'sums', fields[2])
  if not seen[2] then return end
  local sum_r, sum_p, sum_c, head = string.match(seen[1], '(%d+) (%d+) (%d+) (%d+)')
  local r, p, c = string.match(seen[2], '(%d+) (%d+) (%d+)')
  local new_r, new_p, new_c = math.max(r - 1 + requests, 0), math.max(p - held_prompt + prompt, 0),
    math.max(c - held_completion + completion, 0)
  redis.call('HSET', key, 'sums', string.format('%d %d %d %s', sum_r + new_r - r, sum_p + new_p - p,
    sum_c + new_c - c, head), fields[2], string.format('%d %d %d', new_r, new_p, new_c))
end

local function give_back(a, changed, was_payer)
  if a.day == day then
    changed('qo', math.max(a.qo - 1, 0))
    changed('to', math.max(a.to - held_prompt - held_completion, 0))
  end
  if a.month == month then changed('r', math.max(a.r - held_cost, 0)) end
  if was_payer then changed('cr', math.max(a.cr - held_cost, 0)) end
end

-- Counters of an older day or month are dropped; those of a later one start.
local function charge(a, changed, is_payer)
  if a.day <= day then
    local same = a.day == day
    changed('q', (same and a.q or 0) + 1)
    changed('t', (same and a.t or 0) + prompt + completion)
    if not same then
      changed('day', day)
      changed('qo', 0)
      changed('to', 0)
    end
  end
  if a.month <= month then
    local same = a.month == month
    changed('s', (same and a.s or 0) + cost)
    if not same then
      changed('month', month)
      changed('r', 0)
    end
  end
  if is_payer and a.has_credit then changed('credit', a.credit - cost) end
end

local function correct_account(key, is_held, is_payer)
  local seen = redis.call('HMGET', key,
    'seeded', 'credit', 'v', 'day', 'q', 't', 'qo', 'to', 'month', 's', 'r', 'cr')
  local a = {has_credit = seen[2], credit = tonumber(seen[2] or '0')}
  for i, name in ipairs({'v', 'day', 'q', 't', 'qo', 'to', 'month', 's', 'r', 'cr'}) do
    a[name] = tonumber(seen[i + 2] or '0')
  end
  local update = {'HSET', key}
  local function changed(name, value)
    update[#update + 1] = name
    update[#update + 1] = integer(value)
  end
  if is_held then give_back(a, changed, is_payer) end
  if is_settle then
    changed('v', a.v + 1)
    if seen[1] then charge(a, changed, is_payer) end
  end
  if #update == 2 then return end
  redis.call(unpack(update))
  redis.call('PEXPIRE', key, ACCOUNT_MS)
end

for i, name in ipairs(cmsgpack.unpack(fields[8])) do
  if string.sub(fields[9], i, i) == '1' then correct_window(window_prefix .. name) end
  if string.sub(fields[11], i, i) == '1' then
    redis.call('ZREM', running_prefix .. name, ARGV[4])
  end
  correct_account(account_prefix .. name, string.sub(fields[10], i, i) == '1',
    is_prepaid and string.sub(name, 1, 2) == 't:')
end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[4])
if fields[13] or ARGV[10] ~= '' then
  redis.call('HSET', KEYS[1], 'released', 1)
  redis.call('PEXPIRE', KEYS[1], ENDED_MS)
end
return 1

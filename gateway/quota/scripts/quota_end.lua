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
local call, match, sub, max = redis.call, string.match, string.sub, math.max
local id, is_settle = ARGV[4], ARGV[5] == '1'
if ARGV[10] ~= '' then
  local expiry = call('ZSCORE', KEYS[2], id) or '0'
  if tonumber(expiry) ~= tonumber(ARGV[10]) then return 0 end
end
local fields = call('HMGET', KEYS[1],
  'created_ms', 'slot', 'day', 'month', 'prompt', 'completion', 'cost',
  'subjects', 'windows', 'held', 'slots_held', 'prepaid', 'taken')

if is_settle then call('XADD', KEYS[3], '*', 'u', ARGV[9]) end
if not fields[1] then
  if not is_settle then
    call('HSET', KEYS[1], 'released', 1)
    call('PEXPIRE', KEYS[1], RELEASED_MS)
    return 0
  end
  for i = 11, #ARGV do
    local account = ARGV[3] .. ARGV[i]
    call('HINCRBY', account, 'v', 1)
    call('HDEL', account, 'seeded')
    call('PEXPIRE', account, ACCOUNT_MS)
  end
  return 0
end

local requests, prompt, completion = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local cost, tokens = tonumber(ARGV[8]), prompt + completion
local slot, day, month = fields[2], tonumber(fields[3]), tonumber(fields[4])
local held_prompt, held_completion = tonumber(fields[5]), tonumber(fields[6])
local held_cost, held_tokens = tonumber(fields[7]), held_prompt + held_completion

-- A missing slot has already left the window.
local function correct_window(key)
  local seen = call('HMGET', key, 'sums', slot)
  if not seen[2] then return end
  local sum_r, sum_p, sum_c, head = match(seen[1], '(%d+) (%d+) (%d+) (%d+)')
  local r, p, c = match(seen[2], '(%d+) (%d+) (%d+)')
  local new_r, new_p, new_c = max(r - 1 + requests, 0), max(p - held_prompt + prompt, 0),
    max(c - held_completion + completion, 0)
  call('HSET', key, 'sums', string.format('%d %d %d %s', sum_r + new_r - r, sum_p + new_p - p,
    sum_c + new_c - c, head), slot, string.format('%d %d %d', new_r, new_p, new_c))
end

-- Counters of an older day or month are dropped; those of a later one start.
local function correct_account(key, is_held, is_payer)
  local seen = call('HMGET', key,
    'seeded', 'v', 'day', 'q', 't', 'qo', 'to', 'month', 's', 'r', 'cr', 'credit')
  local is_charged = is_settle and seen[1]
  if not (is_held or is_charged) then
    if is_settle then
      call('HSET', key, 'v', (seen[2] or 0) + 1)
      call('PEXPIRE', key, ACCOUNT_MS)
    end
    return
  end
  local old_day, old_month = tonumber(seen[3] or 0), tonumber(seen[8] or 0)
  local qo, to, r, cr = seen[6] or 0, seen[7] or 0, seen[10] or 0, seen[11] or 0
  if is_held then
    if old_day == day then qo, to = max(qo - 1, 0), max(to - held_tokens, 0) end
    if old_month == month then r = max(r - held_cost, 0) end
    if is_payer then cr = max(cr - held_cost, 0) end
  end
  if not is_charged then
    call('HSET', key, 'v', (seen[2] or 0) + requests, 'qo', qo, 'to', to, 'r', r, 'cr', cr)
    call('PEXPIRE', key, ACCOUNT_MS)
    return
  end
  local q, t, s = seen[4], seen[5], seen[9]
  if old_day < day then
    q, t, qo, to = 0, 0, 0, 0
    call('HSET', key, 'day', day)
  end
  if old_day <= day then q, t = q + 1, t + tokens end
  if old_month < month then
    s, r = 0, 0
    call('HSET', key, 'month', month)
  end
  if old_month <= month then s = s + cost end
  local v, credit = (seen[2] or 0) + 1, is_payer and seen[12]
  if credit then
    call('HSET', key, 'v', v, 'q', q, 't', t, 'qo', qo, 'to', to, 's', s, 'r', r, 'cr', cr,
      'credit', credit - cost)
  else
    call('HSET', key, 'v', v, 'q', q, 't', t, 'qo', qo, 'to', to, 's', s, 'r', r, 'cr', cr)
  end
  -- An account in use outlives its counters if its expiry changes once a day.
  if old_day ~= day then call('PEXPIRE', key, ACCOUNT_MS) end
end

local is_as_held = is_settle and prompt == held_prompt and completion == held_completion
for i, name in ipairs(cmsgpack.unpack(fields[8])) do
  if sub(fields[9], i, i) == '1' and not is_as_held then correct_window(ARGV[1] .. name) end
  if sub(fields[11], i, i) == '1' then call('ZREM', ARGV[2] .. name, id) end
  correct_account(ARGV[3] .. name, sub(fields[10], i, i) == '1',
    fields[12] == '1' and sub(name, 1, 2) == 't:')
end
call('DEL', KEYS[1])
call('ZREM', KEYS[2], id)
if fields[13] or ARGV[10] ~= '' then
  call('HSET', KEYS[1], 'released', 1)
  call('PEXPIRE', KEYS[1], ENDED_MS)
end
return 1

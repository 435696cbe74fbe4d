-- End a reservation: settle it with the actual usage, or release it as if it had never existed.
--
-- The first end wins. A settlement that finds no reservation (Redis lost it, or it has ended) still
-- appends its record; the ledger keeps one record per request. Since the counters may or may not
-- include that request, the subjects' accounts must be derived again. A release that finds no
-- reservation leaves a mark for a while. The mark rejects a reservation that arrives after its
-- release. An end by any process but the gateway that reserved leaves the mark too, because that
-- gateway may come back and restore a reservation that it considers lost.
--
-- The numbers of subjects are packed as in quota_reserve.
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
local call, match, byte, max = redis.call, string.match, string.byte, math.max
local pack, read, huge = struct.pack, struct.unpack, math.huge
local NUMBERS, MINUTE, ONE = '>dddddddddd', '>dddddddd', byte('1')
local id, is_settle = ARGV[4], ARGV[5] == '1'
if ARGV[10] ~= '' then
  local expiry = call('ZSCORE', KEYS[2], id) or '0'
  if tonumber(expiry) ~= tonumber(ARGV[10]) then return 0 end
end
local fields = call('HMGET', KEYS[1], 'created_ms', 'request', 'amounts', 'taken')

if is_settle then call('XADD', KEYS[3], '*', 'u', ARGV[9]) end
if not fields[3] then
  -- A reservation of an earlier release, which had no packed amounts.
  if fields[1] then
    call('DEL', KEYS[1])
    call('ZREM', KEYS[2], id)
  end
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
local slot, day, month, held_prompt, held_completion, held_cost = read('>dddddd', fields[3])
local held_tokens = held_prompt + held_completion
local names, windows, held, slots_held, is_prepaid = unpack(cmsgpack.unpack(fields[2]))

-- Return the packed minute with the actual usage in the slot of the request. A missing slot has
-- already left the window.
local function corrected_minute(key, packed)
  local sum_r, sum_p, sum_c, head, current, r, p, c = read(MINUTE, packed)
  local sr, sp, sc, share = r, p, c, nil
  if current ~= slot then
    share = call('HGET', key, string.format('%d', slot))
    if not share then return nil end
    r, p, c = match(share, '(%d+) (%d+) (%d+)')
  end
  local new_r, new_p, new_c = max(r - 1 + requests, 0), max(p - held_prompt + prompt, 0),
    max(c - held_completion + completion, 0)
  if share then
    call('HSET', key, string.format('%d', slot),
      string.format('%d %d %d', new_r, new_p, new_c))
  else
    sr, sp, sc = new_r, new_p, new_c
  end
  return pack(MINUTE, sum_r + new_r - r, sum_p + new_p - p, sum_c + new_c - c, head, current,
    sr, sp, sc)
end

-- Numbers of an older day or month are dropped; those of a later one start.
local function correct_subject(name, is_minute, is_held, is_payer)
  local key, minute, numbers, is_new = ARGV[3] .. name, nil, nil, false
  local seen = call('HMGET', key, 'seeded', 'n', 'v', 'w')
  if is_minute and seen[4] then minute = corrected_minute(ARGV[1] .. name, seen[4]) end
  local is_charged = is_settle and seen[1] and seen[2]
  if is_held or is_charged then
    local old_day, old_month, q, t, s, qo, to, r, credit, cr = 0, 0, 0, 0, 0, 0, 0, 0, huge, 0
    if seen[2] then
      old_day, old_month, q, t, s, qo, to, r, credit, cr = read(NUMBERS, seen[2])
    end
    if is_held then
      if old_day == day then qo, to = max(qo - 1, 0), max(to - held_tokens, 0) end
      if old_month == month then r = max(r - held_cost, 0) end
      if is_payer then cr = max(cr - held_cost, 0) end
    end
    if is_charged then
      is_new = old_day ~= day
      if old_day < day then old_day, q, t, qo, to = day, 0, 0, 0, 0 end
      if old_day <= day then q, t = q + 1, t + tokens end
      if old_month < month then old_month, s, r = month, 0, 0 end
      if old_month <= month then s = s + cost end
      -- What is infinite stays so: no credit is derived.
      if is_payer then credit = credit - cost end
    end
    numbers = pack(NUMBERS, old_day, old_month, q, t, s, qo, to, r, credit, cr)
  end
  local version = is_settle and (seen[3] or 0) + 1 or seen[3] or '0'
  if numbers and minute then
    call('HSET', key, 'v', version, 'n', numbers, 'w', minute)
  elseif numbers then
    call('HSET', key, 'v', version, 'n', numbers)
  elseif minute then
    call('HSET', key, 'v', version, 'w', minute)
  elseif is_settle then
    call('HSET', key, 'v', version)
  else
    return
  end
  -- An account in use outlives its numbers if its expiry changes once a day.
  if not is_charged or is_new then call('PEXPIRE', key, ACCOUNT_MS) end
end

local is_as_held = is_settle and prompt == held_prompt and completion == held_completion
for i = 1, #names do
  local name = names[i]
  if byte(slots_held, i) == ONE then call('ZREM', ARGV[2] .. name, id) end
  correct_subject(name, not is_as_held and byte(windows, i) == ONE, byte(held, i) == ONE,
    is_prepaid and match(name, '^t:'))
end
call('DEL', KEYS[1])
call('ZREM', KEYS[2], id)
if fields[4] or ARGV[10] ~= '' then
  call('HSET', KEYS[1], 'released', 1)
  call('PEXPIRE', KEYS[1], ENDED_MS)
end
return 1

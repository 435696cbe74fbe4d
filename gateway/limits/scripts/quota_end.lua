-- End a reservation: settle it with the actual usage, or release it as if it had never existed.
--
-- The first end wins. A settlement that finds no reservation (Redis lost it, or it has ended) still
-- appends its record; the ledger keeps one record per request. Since the counters may or may not
-- include that request, the subjects' accounts must be derived again. A release that finds no
-- reservation leaves a mark for a while. The mark rejects a reservation that arrives after its
-- release. An end by any process but the gateway that reserved leaves the mark too, because that
-- gateway may come back and restore a reservation that it considers lost.
--
-- KEYS reservation, open_reservations, usage_records
-- ARGV requests: 1 to settle, 0 to release  prompt, completion: tokens  audio: its seconds
--   cost: in micro-dollars; all 0 to release
--   record: usage record; empty to release
--   expired_at: expiry of the lease, to end the reservation only if it is still open and was not
--     renewed since; or empty
--   then the names of the subjects, if there is no reservation
-- Output 1 if the reservation was open, else 0
-- @include server
-- @include accounts
-- @include audio
-- @include amounts
-- @include minute
local reservation, open_reservations, usage_records = unpack(KEYS, 1, 3)
local id, window_prefix, running_prefix, account_prefix, requests, prompt, completion, audio, cost,
  record, expired_at = unpack(ARGV, 1, 11)
local first_subject, RELEASED_MS, ENDED_MS = 12, 120000, 3600000
local byte, ONE = string.byte, string.byte('1')
if expired_at ~= '' then
  local expiry = call('ZSCORE', open_reservations, id) or '0'
  if tonumber(expiry) ~= tonumber(expired_at) then return 0 end
end
local created_ms, request, amounts, taken = unpack(
  call('HMGET', reservation, 'created_ms', 'request', 'amounts', 'taken'))
local is_settle = requests == '1'

if is_settle then call('XADD', usage_records, '*', 'u', record) end
if not amounts then
  -- A reservation of an earlier release, which had no packed amounts.
  if created_ms then
    call('DEL', reservation)
    call('ZREM', open_reservations, id)
  end
  if not is_settle then
    call('HSET', reservation, 'released', 1)
    call('PEXPIRE', reservation, RELEASED_MS)
    return 0
  end
  for i = first_subject, #ARGV do
    local account = account_prefix .. ARGV[i]
    call('HINCRBY', account, 'v', 1)
    call('HDEL', account, 'seeded')
    call('PEXPIRE', account, ACCOUNT_MS)
  end
  return 0
end

prompt, completion, cost = tonumber(prompt), tonumber(completion), tonumber(cost)
audio = tonumber(audio)
local slot, day, month, held_prompt, held_completion, held_cost, held_audio = read_amounts(amounts)
local names, windows, held, slots_held, is_prepaid = unpack(cmsgpack.unpack(request))
local is_as_held = is_settle and prompt == held_prompt and completion == held_completion
for i = 1, #names do
  local name = names[i]
  local key, account, minute, is_new = account_prefix .. name, nil, nil, false
  if byte(slots_held, i) == ONE then call('ZREM', running_prefix .. name, id) end
  local seeded, old, version, packed = unpack(call('HMGET', key, 'seeded', 'n', 'v', 'w'))
  if not is_as_held and packed and byte(windows, i) == ONE then
    minute = change_slot(window_prefix .. name, packed, slot, requests - 1, prompt - held_prompt,
      completion - held_completion)
  end
  local is_held, is_charged = byte(held, i) == ONE, is_settle and seeded and old
  if is_held or is_charged then
    account, is_new = end_in_account(old, day, month, held_prompt + held_completion, held_cost,
      is_held, prompt + completion, cost, is_charged, is_prepaid and string.match(name, '^t:'))
  end
  if audio + held_audio > 0 and (is_held or is_charged) then
    add_audio(key, day, is_charged and audio or 0, is_held and -held_audio or 0)
  end
  version = is_settle and (version or 0) + 1 or version or '0'
  if account and minute then
    call('HSET', key, 'v', version, 'n', account, 'w', minute)
  elseif account then
    call('HSET', key, 'v', version, 'n', account)
  elseif minute then
    call('HSET', key, 'v', version, 'w', minute)
  elseif is_settle then
    call('HSET', key, 'v', version)
  end
  -- An account in use outlives its numbers if its expiry changes once a day.
  local is_written = account or minute or is_settle
  if is_written and (not is_charged or is_new) then call('PEXPIRE', key, ACCOUNT_MS) end
end
call('DEL', reservation)
call('ZREM', open_reservations, id)
if taken or expired_at ~= '' then
  call('HSET', reservation, 'released', 1)
  call('PEXPIRE', reservation, ENDED_MS)
end
return 1

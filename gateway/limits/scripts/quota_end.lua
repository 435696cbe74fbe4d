-- End reservations of a tenant: settle each with the actual usage, or release it as if it had never
-- existed.
--
-- The first end wins. A settlement that finds no reservation (Redis lost it, or it has ended) still
-- appends its record; the ledger counts each request once. Since the counters may or may not
-- include that request, the subjects' accounts must be derived again. This also holds for a release
-- with the record of a request that may have been settled before. A release that finds no
-- reservation leaves a mark for a while. The mark rejects a reservation that arrives after its
-- release. An end by any process but the gateway that reserved leaves the mark too, because that
-- gateway may come back and restore a reservation that it considers lost.
--
-- KEYS open_reservations, usage_records, then the reservation of each request
-- ARGV window_prefix, running_prefix, account_prefix, then for each request:
--   id  expired_at: expiry of the lease, to end the reservation only if it is still open and was not
--     renewed since; or empty
--   requests: 1 to settle, 0 to release  prompt, completion: tokens  audio: its seconds
--   cost: in micro-dollars; all 0 to release  record: usage record; empty if there is none
--   owners: msgpack: the names of the subjects whose accounts may have to be derived again
-- Output for each request 1 if the reservation was open, else 0
-- @include server
-- @include accounts
-- @include audio
-- @include slices
local open_reservations, usage_records = unpack(KEYS, 1, 2)
local window_prefix, running_prefix, account_prefix = unpack(ARGV, 1, 3)
local first_key, first_argument, fields, RELEASED_MS, ENDED_MS = 2, 4, 9, 120000, 3600000
local byte, ONE = string.byte, string.byte('1')
local replies, ends, accounts, names_of, seen = {}, {}, {}, {}, {}
local gone, gone_ids, marks, unknown, decoded = {}, {}, {}, {}, {}

-- Reads come first, so that an error in one of the reservations changes nothing.
for i = 1, #KEYS - first_key do
  local at = first_argument + (i - 1) * fields
  local id, expired_at, requests, prompt, completion, audio, cost, record, owners = unpack(ARGV, at,
    at + fields - 1)
  replies[i] = 0
  if expired_at == ''
    or tonumber(call('ZSCORE', open_reservations, id) or '0') == tonumber(expired_at) then
    local key, is_settle = KEYS[i + first_key], requests == '1'
    local created_ms, request, amounts, taken = unpack(
      call('HMGET', key, 'created_ms', 'request', 'amounts', 'taken'))
    -- A reservation of an earlier release has no packed amounts.
    local is_open = amounts and not seen[id]
    if created_ms and not seen[id] then gone[#gone + 1], gone_ids[#gone_ids + 1] = key, id end
    seen[id] = true
    if is_open then
      -- Requests of one key have the same subjects.
      decoded[request] = decoded[request] or cmsgpack.unpack(request)
      replies[i] = 1
      if taken or expired_at ~= '' then marks[#marks + 1] = {key, ENDED_MS} end
    elseif record == '' then
      marks[#marks + 1] = {key, RELEASED_MS}
    end
    if record ~= '' and not (is_open and is_settle) then
      unknown[#unknown + 1] = cmsgpack.unpack(owners)
    end
    ends[#ends + 1] = {
      id = id, is_settle = is_settle, requests = tonumber(requests), prompt = tonumber(prompt),
      completion = tonumber(completion), audio = tonumber(audio), cost = tonumber(cost),
      record = record, amounts = amounts, held = is_open and {read_amounts(amounts)},
      request = is_open and decoded[request]
    }
  end
end

local function account_of(name)
  if not accounts[name] then
    local key = account_prefix .. name
    local seeded, old, version, packed = unpack(call('HMGET', key, 'seeded', 'n', 'v', 'w'))
    -- All fields at once: a table that grows later costs as much as a command.
    accounts[name] = {
      key = key, seeded = seeded, n = old, v = version, w = packed, ended = {}, has_account = false,
      has_minute = false, is_written = false, expires = false
    }
    names_of[#names_of + 1] = name
  end
  return accounts[name]
end

local function end_in_subject(e, name, is_windowed, is_held, is_prepaid)
  local _, day, month, held_prompt, held_completion, held_cost, held_audio = unpack(e.held)
  local s, is_new, minute = account_of(name), false, nil
  local is_as_held = e.is_settle and e.prompt == held_prompt and e.completion == held_completion
  if not is_as_held and s.w and is_windowed then
    e.changes = e.changes or changes_of(e)
    for _, change in ipairs(e.changes) do
      minute = change_slot(window_prefix .. name, minute or s.w, unpack(change)) or minute
    end
  end
  local is_charged = e.is_settle and s.seeded and s.n
  if is_held or is_charged then
    s.n, is_new = end_in_account(s.n, day, month, held_prompt + held_completion, held_cost, is_held,
      e.prompt + e.completion, e.cost, is_charged, is_prepaid and string.match(name, '^t:'))
    s.has_account = true
    if e.audio + held_audio > 0 then
      add_audio(s.key, day, is_charged and e.audio or 0, is_held and -held_audio or 0)
    end
  end
  s.v = e.is_settle and (s.v or 0) + 1 or s.v or '0'
  s.w, s.has_minute = minute or s.w, s.has_minute or minute
  if is_held or is_charged or minute or e.is_settle then
    -- An account in use outlives its numbers if its expiry changes once a day.
    s.is_written, s.expires = true, s.expires or not is_charged or is_new
  end
end

write_if_full(open_reservations)
for _, e in ipairs(ends) do
  if e.record ~= '' then call('XADD', usage_records, '*', 'u', e.record) end
  if e.held then
    local names, windows, held, slots_held, is_prepaid = unpack(e.request)
    for i = 1, #names do
      end_in_subject(e, names[i], byte(windows, i) == ONE, byte(held, i) == ONE, is_prepaid)
      if byte(slots_held, i) == ONE then
        local ended = accounts[names[i]].ended
        ended[#ended + 1] = e.id
      end
    end
  end
end

for _, name in ipairs(names_of) do
  local s = accounts[name]
  if #s.ended > 0 then call('ZREM', running_prefix .. name, unpack(s.ended)) end
  if s.has_account and s.has_minute then
    call('HSET', s.key, 'v', s.v, 'n', s.n, 'w', s.w)
  elseif s.has_account then
    call('HSET', s.key, 'v', s.v, 'n', s.n)
  elseif s.has_minute then
    call('HSET', s.key, 'v', s.v, 'w', s.w)
  elseif s.is_written then
    call('HSET', s.key, 'v', s.v)
  end
  if s.expires then call('PEXPIRE', s.key, ACCOUNT_MS) end
end
if #gone > 0 then
  call('DEL', unpack(gone))
  call('ZREM', open_reservations, unpack(gone_ids))
end
for _, mark in ipairs(marks) do
  call('HSET', mark[1], 'released', 1)
  call('PEXPIRE', mark[1], mark[2])
end
for _, owners in ipairs(unknown) do
  for _, name in ipairs(owners) do
    local account = account_prefix .. name
    call('HINCRBY', account, 'v', 1)
    call('HDEL', account, 'seeded')
    call('PEXPIRE', account, ACCOUNT_MS)
  end
end
return replies

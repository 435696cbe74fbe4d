-- End requests of a tenant: settle each with the actual usage, or release it as if it had never
-- existed.
--
-- The first end wins. A settlement of a request that Redis has lost, or that the sweep has ended,
-- still appends its usage record, and the ledger counts each request once. The counters may include
-- it or not, so the accounts must be derived again. A release of an unknown request leaves a mark for
-- a while, which rejects the request if it arrives later. A record stays as long as a kept response,
-- with its Idempotency-Key, or if the sweep ends the request: the owner may come back.
--
-- KEYS open_requests, usage_records, then the record of each request
-- ARGV window_prefix, running_prefix, account_prefix, ends_prefix, bytes_prefix, then for each request:
--   id  expired_at: expiry of the lease, to end the request only if it is still running and was not
--     renewed since; or empty  event: `settle`, `release`, or `cancel` for a paused one
--   prompt, completion: tokens  audio: its seconds  cost: in micro-dollars; all 0 to release
--   record: usage record; empty if there is none
--   owners: msgpack: the names of the subjects whose accounts may have to be derived again
--   state: which the record has then; empty to remove it  settled: what is charged, of a paused one
--   kept: as for `request_admit`, if the owner ends the request
--   bytes: that Redis stores for it from now on; empty if that is unchanged
-- Output for each request 1 if it was running, else 0
-- @include records
-- @include accounts
-- @include audio
-- @include slices
-- @include stored
local open_requests, usage_records = unpack(KEYS, 1, 2)
local window_prefix, running_prefix, account_prefix, ends_prefix, bytes_prefix = unpack(ARGV, 1, 5)
local first_key, first_argument, fields, RELEASED_MS, ENDED_MS = 2, 6, 13, 120000, 3600000
local byte, ONE = string.byte, string.byte('1')
local replies, ends, accounts, names_of, seen = {}, {}, {}, {}, {}
local gone, gone_ids, ended, unknown, decoded, stored = {}, {}, {}, {}, {}, {}

-- Reads come first, so that an error in one of the records changes nothing.
for i = 1, #KEYS - first_key do
  local at, key = first_argument + (i - 1) * fields, KEYS[i + first_key]
  local id, expired_at, event, prompt, completion, audio, cost, record, owners, new_state, settled,
    kept, bytes = unpack(ARGV, at, at + fields - 1)
  local created_ms, request, amounts, state, ends_as, term, index, retention, earlier, counted = unpack(
    call('HMGET', key, 'created_ms', 'request', 'amounts', 'state', 'ends_as', 'term', 'key',
      'retention', 'bytes', 'counted'))
  kept = kept ~= '' and cmsgpack.unpack(kept)
  state = seen[id] or state_of(created_ms, state)
  local exists = may(event, state, term, kept and tostring(kept[2]))
  replies[i] = 0
  local is_expired = expired_at == ''
    or tonumber(call('ZSCORE', open_requests, id) or '0') == tonumber(expired_at)
  if exists and is_expired then
    local is_settle, is_open = event == 'settle', state == RUNNING
    if is_open then
      -- Requests of one key have the same subjects.
      decoded[request] = decoded[request] or cmsgpack.unpack(request)
      replies[i] = 1
      gone_ids[#gone_ids + 1] = id
    elseif event == 'release' then
      new_state = RELEASED
    end
    if ends_as and (expired_at ~= '' or ends_as == DELETED) then new_state = ends_as end
    local stays_ms = new_state == RELEASED and RELEASED_MS or kept and kept[4] or retention or ENDED_MS
    if new_state == '' then
      gone[#gone + 1] = key
    else
      ended[#ended + 1] = {key, new_state, settled, kept, created_ms, stays_ms, index, id}
    end
    bytes = bytes_of_ended(new_state, tonumber(bytes), kept, earlier, index)
    if bytes then
      local names = counted and cmsgpack.unpack(counted) or kept[7]
      stored[#stored + 1] = {key, ends_prefix, bytes_prefix, names, bytes, stays_ms}
    end
    if index and (new_state == '' or new_state == RELEASED) then gone[#gone + 1] = index end
    seen[id] = new_state == '' and ABSENT or new_state
    if record ~= '' and not is_open then unknown[#unknown + 1] = cmsgpack.unpack(owners) end
    ends[#ends + 1] = {
      id = id, is_settle = is_settle, requests = is_settle and 1 or 0, prompt = tonumber(prompt),
      completion = tonumber(completion), audio = tonumber(audio), cost = tonumber(cost),
      record = record, amounts = amounts, held = is_open and {read_amounts(amounts)},
      request = is_open and decoded[request], second = is_open and math.floor(created_ms / 1000)
    }
  end
end

local function account_of(name)
  if not accounts[name] then
    accounts[name] = numbers_of(account_prefix .. name)
    names_of[#names_of + 1] = name
  end
  return accounts[name]
end

local function end_in_subject(e, name, is_windowed, is_held, is_prepaid, bounds)
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
  if bounds then month = window_of_ended(s, bounds, e.second) end
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

write_if_full(open_requests)
for _, e in ipairs(ends) do
  if e.record ~= '' then call('XADD', usage_records, '*', 'u', e.record) end
  if e.held then
    local names, windows, held, slots_held, is_prepaid, spending = unpack(e.request)
    for i = 1, #names do
      end_in_subject(e, names[i], byte(windows, i) == ONE, byte(held, i) == ONE, is_prepaid,
        spending and spending[i])
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
  if s.expires then call('PEXPIRE', s.key, stays_ms_of(s.bounds, now_ms())) end
  if s.is_moved then call('HDEL', s.key, 'seeded') end
end
for _, s in ipairs(stored) do count_bytes(unpack(s)) end
if #gone > 0 then call('DEL', unpack(gone)) end
if #gone_ids > 0 then call('ZREM', open_requests, unpack(gone_ids)) end
for _, e in ipairs(ended) do write_ended(unpack(e)) end
for _, owners in ipairs(unknown) do
  for _, name in ipairs(owners) do derive_again(account_prefix .. name) end
end
return replies

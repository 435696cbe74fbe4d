-- Write the durable counters of a subject, unless something changed after they were derived.
--
-- Amounts that open requests hold of the same day and month stay.
--
-- KEYS account, accounts
-- ARGV version: of the account before the counters were derived
--   requests, tokens, audio: of the day  cost: of the month  credit: empty if it has none
--   stays_ms: how long the account stays
-- Output 1 if written, 0 if it is already seeded or the version differs
-- @include server
-- @include accounts
-- @include audio
local account, accounts = unpack(KEYS, 1, 2)
local subject, version, day, requests, tokens, audio, month, cost, credit, stays_ms = unpack(ARGV, 1, 10)
local seeded, known_version, packed, old_audio = unpack(
  call('HMGET', account, 'seeded', 'v', 'n', 'a'))
if seeded or (known_version or '0') ~= version then return 0 end
local a = read_account(packed)
if a.day ~= tonumber(day) then a.held_requests, a.held_tokens = 0, 0 end
if a.month ~= tonumber(month) then a.held_cost = 0 end
a.day, a.requests, a.tokens, a.month, a.cost = day, requests, tokens, month, cost
if credit ~= '' then a.credit = credit end
call('HSET', account, 'seeded', 1, 'n', pack_account(a))
day, audio = tonumber(day), tonumber(audio)
local audio_day, _, held_audio = read_audio(old_audio, day)
if old_audio or audio > 0 then
  write_audio(account, day, audio, audio_day == day and held_audio or 0)
end
call('PEXPIRE', account, stays_ms)
-- A tenant may have a million end users: their accounts are not compared with the ledger.
if not string.find(subject, '/', 1, true) then call('SADD', accounts, subject) end
return 1

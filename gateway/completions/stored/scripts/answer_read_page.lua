-- Read a response and a page of its journal.
--
-- KEYS response, journal
-- ARGV index: of the first entry, from 0  most_entries
--   most_bytes: after which no entry is added  with_head: 1 to read the head, which may be large
-- Returns {} if the response does not exist, else {owner, term, background: 0 or 1; empty if an
--   earlier release stored it, handles, reservation, state, settled tokens, gateway of the handles,
--   total number of entries, {entry, ...}, head if requested}
-- @include server
local response, journal = unpack(KEYS, 1, 2)
local index, most_entries, most_bytes, with_head = unpack(ARGV, 1, 4)
local owner, term, background, handles, reservation, state, settled, unread_owner, unread_handles =
  unpack(call('HMGET', response, 'owner', 'term', 'background', 'handles', 'reservation', 'state',
    'settled', 'unread_owner', 'unread_handles'))
if not owner then return {} end
if unread_owner then handles = unread_handles end
local entries, bytes = {}, 0
for i = tonumber(index), index + most_entries - 1 do
  local entry = bytes < tonumber(most_bytes) and call('LINDEX', journal, i)
  if not entry then break end
  entries[#entries + 1] = entry
  bytes = bytes + #entry
end
return {owner, term, background or '', handles, reservation, state, settled, unread_owner or owner,
  call('LLEN', journal), entries, with_head == '1' and call('HGET', response, 'head') or nil}

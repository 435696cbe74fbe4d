-- Read a page of a response's journal.
--
-- KEYS content, journal
-- ARGV index: of the first entry, from 0  most_entries
--   most_bytes: after which no entry is added  with_head: 1 to read the head, which may be large
-- Returns {} if the content does not exist, else {gateway and handles of its jobs, total number of
--   entries, {entry, ...}, head if requested}
-- @include server
local content, journal = unpack(KEYS, 1, 2)
local index, most_entries, most_bytes, with_head = unpack(ARGV, 1, 4)
local gateway, handles = unpack(call('HMGET', content, 'gateway', 'handles'))
if not gateway then return {} end
local entries, bytes = {}, 0
for i = tonumber(index), index + most_entries - 1 do
  local entry = bytes < tonumber(most_bytes) and call('LINDEX', journal, i)
  if not entry then break end
  entries[#entries + 1] = entry
  bytes = bytes + #entry
end
return {gateway, handles, call('LLEN', journal), entries,
  with_head == '1' and call('HGET', content, 'head') or nil}

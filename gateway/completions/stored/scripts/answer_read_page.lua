-- Read a response and a page of its journal.
--
-- KEYS[1] response  KEYS[2] journal
-- ARGV[1] first entry, from 0  ARGV[2] most entries
-- ARGV[3] number of bytes after which no entry is added
-- ARGV[4] 1 to read the head, which may be large
-- Returns {} if the response does not exist, else {owner, term, handles, reservation, state,
--   settled tokens, gateway of the handles, total number of entries, {entry, ...},
--   head if requested}
local fields = redis.call('HMGET', KEYS[1], 'owner', 'term', 'handles', 'reservation', 'state', 'settled',
  'unread_owner', 'unread_handles')
if not fields[1] then return {} end
if fields[7] then fields[3] = fields[8] else fields[7] = fields[1] end
local entries, bytes = {}, 0
for index = tonumber(ARGV[1]), ARGV[1] + ARGV[2] - 1 do
  if bytes >= tonumber(ARGV[3]) then break end
  local entry = redis.call('LINDEX', KEYS[2], index)
  if not entry then break end
  entries[#entries + 1] = entry
  bytes = bytes + #entry
end
fields[8] = redis.call('LLEN', KEYS[2])
fields[9] = entries
if ARGV[4] == '1' then fields[10] = redis.call('HGET', KEYS[1], 'head') end
return fields

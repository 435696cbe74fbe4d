-- Read an answer, and its journal from an entry on.
--
-- KEYS[1] answer  KEYS[2] journal
-- ARGV[1] first entry, from 0  ARGV[2] most entries
-- Output {} if there is no such answer, else {head, owner, term, handles, reservation, state, tokens settled,
--   entries in all, {entry, ...}}
local fields = redis.call('HMGET', KEYS[1], 'head', 'owner', 'term', 'handles', 'reservation', 'state', 'settled')
if not fields[1] then return {} end
local entries = {}
if ARGV[2] ~= '0' then entries = redis.call('LRANGE', KEYS[2], ARGV[1], ARGV[1] + ARGV[2] - 1) end
fields[8] = redis.call('LLEN', KEYS[2])
fields[9] = entries
return fields

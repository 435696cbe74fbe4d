-- Count the bytes that Redis stores for a request: for its tenant, and for its key and project
-- where they are limited.
--
-- Bytes that are not returned expire, so those of a dead gateway do not count forever.
--
-- It may also be called while the memory of Redis is full: the first write removes what is counted,
-- which frees memory (see _server.lua).
--
-- KEYS for each subject: 1. sorted set: request id -> expiry of its bytes, in Unix milliseconds
--   2. hash: request id -> bytes; the total under the empty name
-- ARGV id: of the request, empty to change nothing  bytes: from now on, 0 returns them
--   live_ms: milliseconds after which they expire; then the limit of each subject, -1 for none
-- Output {0, bytes of each subject...} if accepted; {subject, its bytes} if this subject rejects,
--   and nothing is changed
-- @include server
local id, bytes, live_ms = unpack(ARGV, 1, 3)
local first_limit, EXPIRED_AT_ONCE = 4, 200
bytes, live_ms = tonumber(bytes), tonumber(live_ms)
local now = now_ms()

local function integer(value) return string.format('%d', value) end

local function drop(s, name)
  s.is_changed = true
  s.sum = s.sum - tonumber(call('HGET', s.bytes, name) or '0')
  call('HDEL', s.bytes, name)
  call('ZREM', s.ends, name)
end

local function load_subject(number)
  local ends, held = unpack(KEYS, 2 * number - 1, 2 * number)
  local s = {ends = ends, bytes = held, limit = tonumber(ARGV[first_limit - 1 + number])}
  s.sum = tonumber(call('HGET', s.bytes, '') or '0')
  local expired = call('ZRANGEBYSCORE', s.ends, '-inf', integer(now),
    'LIMIT', 0, EXPIRED_AT_ONCE)
  for _, name in ipairs(expired) do drop(s, name) end
  return s
end

local function save(s)
  if not s.is_changed then return end
  local last = call('ZREVRANGE', s.ends, 0, 0, 'WITHSCORES')[2]
  if not last then
    call('DEL', s.ends, s.bytes)
    s.sum = 0
    return
  end
  call('HSET', s.bytes, '', integer(s.sum))
  call('PEXPIREAT', s.ends, integer(last + 1000))
  call('PEXPIREAT', s.bytes, integer(last + 1000))
end

local subjects, refusing = {}, nil
for number = 1, #KEYS / 2 do
  local s = load_subject(number)
  local before = tonumber(call('HGET', s.bytes, id) or '0')
  if id ~= '' and s.limit >= 0 and bytes > before and s.sum - before + bytes > s.limit then
    refusing = refusing or number
  end
  subjects[number] = s
end

local reply = {0}
for number, s in ipairs(subjects) do
  if id ~= '' and not refusing then
    drop(s, id)
    if bytes > 0 then
      call('HSET', s.bytes, id, integer(bytes))
      call('ZADD', s.ends, integer(now + live_ms), id)
      s.sum = s.sum + bytes
    end
  end
  save(s)
  reply[number + 1] = s.sum
end
return refusing and {refusing, subjects[refusing].sum} or reply

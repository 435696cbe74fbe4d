-- Count the bytes that Redis stores for a request: for its tenant, and for its key and project
-- where they are limited.
--
-- Bytes that are not returned expire, so those of a dead gateway do not count forever.
--
-- KEYS for each subject: 1. sorted set: request id -> expiry of its bytes, in Unix milliseconds
--   2. hash: request id -> bytes; the total under the empty name
-- ARGV[1] request id, empty to change nothing  ARGV[2] its bytes from now on, 0 returns them
-- ARGV[3] milliseconds after which they expire  ARGV[4] limit of each subject, -1 for none...
-- Output {0, bytes of each subject...} if accepted; {subject, its bytes} if this subject rejects,
--   and nothing is changed
local EXPIRED_AT_ONCE = 200
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local id, bytes, live_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local function integer(value) return string.format('%d', value) end

local function drop(s, name)
  s.sum = s.sum - tonumber(redis.call('HGET', s.bytes, name) or '0')
  redis.call('HDEL', s.bytes, name)
  redis.call('ZREM', s.ends, name)
end

local function load_subject(number)
  local s = {
    ends = KEYS[2 * number - 1], bytes = KEYS[2 * number], limit = tonumber(ARGV[3 + number])
  }
  s.sum = tonumber(redis.call('HGET', s.bytes, '') or '0')
  local expired = redis.call('ZRANGEBYSCORE', s.ends, '-inf', integer(now),
    'LIMIT', 0, EXPIRED_AT_ONCE)
  for _, name in ipairs(expired) do drop(s, name) end
  return s
end

local function save(s)
  local last = redis.call('ZREVRANGE', s.ends, 0, 0, 'WITHSCORES')[2]
  if not last then
    redis.call('DEL', s.ends, s.bytes)
    s.sum = 0
    return
  end
  redis.call('HSET', s.bytes, '', integer(s.sum))
  redis.call('PEXPIREAT', s.ends, integer(last + 1000))
  redis.call('PEXPIREAT', s.bytes, integer(last + 1000))
end

local subjects, refusing = {}, nil
for number = 1, #KEYS / 2 do
  local s = load_subject(number)
  local before = tonumber(redis.call('HGET', s.bytes, id) or '0')
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
      redis.call('HSET', s.bytes, id, integer(bytes))
      redis.call('ZADD', s.ends, integer(now + live_ms), id)
      s.sum = s.sum + bytes
    end
  end
  save(s)
  reply[number + 1] = s.sum
end
return refusing and {refusing, subjects[refusing].sum} or reply

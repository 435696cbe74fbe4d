-- Claim an Idempotency-Key for a request, unless it stands for another one.
--
-- The claim makes the record of the request, which is admitted later. A key whose request has failed,
-- was released or is gone is free.
--
-- KEYS entry: of the key  record: of the request
-- ARGV id, body: digest of the request's body  gateway: that admits the request
--   retention_ms: TTL of both until the request is admitted
--   in_place_of: id of a request that this one replaces, unless it runs or is deleted; or empty
--   record_prefix
-- Output {id of the request for which the key stands now, digest of its body, its state, its owner,
--   its age in milliseconds}
-- @include states
local entry, record = unpack(KEYS, 1, 2)
local id, body, gateway, retention_ms, in_place_of, record_prefix = unpack(ARGV, 1, 6)
local RELEASED_MS, now = 120000, now_ms()

local seen, seen_body = unpack(call('HMGET', entry, 'request', 'body'))
if seen then
  local other = record_prefix .. seen
  local created_ms, found, ends_as, owner = unpack(
    call('HMGET', other, 'created_ms', 'state', 'ends_as', 'owner'))
  local state = state_of(created_ms, ends_as or found)
  -- One that is shown as ended holds amounts until it is settled.
  local is_replaced = seen == in_place_of and not ends_as and state ~= RUNNING and state ~= DELETED
  if not (is_replaced or state == ABSENT or state == FAILED or state == RELEASED) then
    return {seen, seen_body, state, owner or '', now - tonumber(created_ms)}
  end
  if state ~= ABSENT then call('HDEL', other, 'key') end
  if is_replaced then
    call('HSET', other, 'state', RELEASED)
    call('PEXPIRE', other, RELEASED_MS)
  end
end
-- Its gateway has given it up if it is not absent.
local created_ms, state = unpack(call('HMGET', record, 'created_ms', 'state'))
if may('claim', state_of(created_ms, state)) then
  call('HSET', entry, 'request', id, 'body', body)
  call('HSET', record, 'created_ms', string.format('%d', now), 'state', CLAIMED, 'owner', gateway,
    'term', 1, 'key', entry)
  call('PEXPIRE', entry, retention_ms)
  call('PEXPIRE', record, retention_ms)
end
return {id, body, CLAIMED, gateway, 0}

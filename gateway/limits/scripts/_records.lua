-- How scripts write the record of a request.
-- @include states

-- Return whether the event exists in this state, for a caller of this term; none if the response is
-- not kept. A running request may be admitted again by its owner, whose reply was lost.
local function is_transition(extends, state, known_term, term)
  if extends then return may('extend', state, known_term, term) end
  if state == RUNNING then return known_term == (term or false) end
  return may('admit', state) and (state ~= PAUSED or known_term == tostring(term and term - 1))
end

local function write_record(described, key, created_ms, draft, amounts, kept, state, index, id,
  has_bytes)
  call('HSET', key, 'created_ms', created_ms, 'request', described, 'amounts', amounts, 'record',
    draft)
  if kept then
    local owner, term, background, retention_ms, entry, body = unpack(kept)
    call('HSET', key, 'owner', owner, 'term', term, 'background', background, 'retention',
      retention_ms)
    if state == ABSENT and entry ~= '' and call('HSETNX', entry, 'request', id) == 1 then
      -- Redis has lost both.
      call('HSET', entry, 'body', body)
      call('HSET', key, 'key', entry)
    end
  end
  if state == CLAIMED or state == PAUSED or state == ABSENT and has_bytes then
    -- It stays until it ends, however long that takes.
    call('HDEL', key, 'state')
    call('PERSIST', key)
    if index then call('PERSIST', index) end
  end
end

-- Leave what is needed of a request that has ended. Redis may have lost its record.
local function write_ended(key, state, settled, kept, created_ms, stays_ms, index, id)
  if created_ms then
    local key_of_released = state == RELEASED and 'key' or ''
    call('HDEL', key, 'request', 'amounts', 'record', 'ends_as', key_of_released)
  elseif kept then
    call('HSET', key, 'created_ms', string.format('%d', now_ms()), 'owner', kept[1], 'term', kept[2],
      'background', kept[3])
    if state ~= RELEASED and kept[5] ~= '' and call('HSETNX', kept[5], 'request', id) == 1 then
      index = kept[5]
      call('HSET', index, 'body', kept[6])
      call('HSET', key, 'key', index)
    end
  end
  call('HSET', key, 'state', state, 'settled', settled)
  call('PEXPIRE', key, stays_ms)
  if index and state ~= RELEASED then call('PEXPIRE', index, stays_ms) end
end

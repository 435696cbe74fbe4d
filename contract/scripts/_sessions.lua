-- Sessions: which worker served each session of a tenant last (see contract.affinity).
--
-- A tenant has a bounded number of them. Beyond it, random ones of the tenant go. A session is
-- forgotten ten minutes after its last job was claimed.
--
-- `state` is that of a claim. It has the names worker, now, hinted and session_prefix.
-- @include server

local most_sessions, session_ms, record_bytes = 1024, 600000, 12

-- Return the digest of a job's session, which the last record of its affinity has; nil: it has none.
local function session_of(records)
  local mark = string.byte(records or '', -4)
  if mark and math.floor(mark / 64) == 1 then return string.sub(records, -record_bytes, -5) end
  return nil
end

-- Return the digest of the exactness class of a job's last token, which the first record of its
-- affinity has; nil: it has none.
local function class_of(records)
  local mark = string.byte(records or '', record_bytes - 3)
  if mark and math.floor(mark / 32) == 1 then return string.sub(records, 1, record_bytes - 4) end
  return nil
end

-- Return the worker that served a session last; nil if it is not known.
local function server_of(state, tenant, session)
  local noted = call('HGET', state.session_prefix .. tenant, session)
  local at, worker = string.match(noted or '', '^(%d+) (.*)$')
  return worker and state.now - at < session_ms and worker or nil
end

-- Note that the worker serves the session of a job, if it has one.
local function note_session(state, tenant, records)
  local session, key = session_of(records), state.session_prefix .. tenant
  if not session then return end
  if call('HSET', key, session, string.format('%.0f %s', state.now, state.worker)) == 1
    and call('HLEN', key) > most_sessions then
    call('HDEL', key, call('HRANDFIELD', key))
  end
  call('PEXPIRE', key, session_ms)
  call('SET', state.hinted, 1, 'PX', session_ms)
end

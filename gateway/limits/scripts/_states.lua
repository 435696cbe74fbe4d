-- The record of an admitted request, and the one table of its transitions (decision 56).
--
-- A record that is `running` holds `amounts` of limits. It has an owner and a term if its response
-- is kept; otherwise nobody can take it over, and its end removes it. A script that finds a state from
-- which its event does not lead changes nothing, and reports so.
-- @include server

local ABSENT, CLAIMED, RUNNING, PAUSED = 'absent', 'claimed', 'running', 'paused'
local FAILED, RELEASED, DELETED = 'failed', 'released', 'deleted'

-- For each event the states in which it may happen.
local TRANSITIONS = {
  claim = {absent = true},
  -- From `paused`, the next term.
  admit = {absent = true, claimed = true, paused = true},
  extend = {running = true},
  renew = {running = true},
  -- Bytes that are stored for no request have a record without a state.
  keep = {absent = true, running = true},
  adopt = {running = true},
  stop = {running = true},
  -- A record that Redis has lost, as a whole or what came after its claim, or that the sweep has
  -- ended, is settled by its owner all the same.
  settle = {absent = true, claimed = true, running = true, paused = true},
  release = {absent = true, claimed = true, running = true},
  cancel = {paused = true},
  forget = {paused = true, finished = true, failed = true, cancelled = true}
}

-- Return the state of a record by its fields.
local function state_of(created_ms, state)
  return state or created_ms and RUNNING or ABSENT
end

-- Return whether a transition exists for a caller of this term; none if the caller knows no term.
local function may(event, state, known_term, term)
  local is_of_term = not known_term or not term or known_term == term
  return TRANSITIONS[event][state] and is_of_term or false
end

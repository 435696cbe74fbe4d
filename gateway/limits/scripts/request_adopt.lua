-- Begin a new term of a running request, with another gateway as its owner.
--
-- What the record holds stays as it is. The former owner may only be disconnected, and come back
-- later: its events are of an earlier term then, and change nothing.
--
-- KEYS record, open_requests
-- ARGV running_prefix, id, lease_ms, term: the new one  owner: of the new term
--   draft: of the usage record, with which the sweep settles the request from now on
-- Output the completion tokens that are reserved, or -1 if the request is not running, or not of the
--   term before
-- @include states
-- @include renewing
-- @include amounts
local record, open_requests = unpack(KEYS, 1, 2)
local running_prefix, id, lease_ms, term, owner, draft = unpack(ARGV, 1, 6)
local created_ms, state, ends_as, known_term, request, amounts = unpack(
  call('HMGET', record, 'created_ms', 'state', 'ends_as', 'term', 'request', 'amounts'))
local is_of_term = known_term == string.format('%d', term - 1)
if not (is_of_term and may('adopt', state_of(created_ms, ends_as or state))) then return -1 end
write_if_full(open_requests)
call('HSET', record, 'record', draft, 'owner', owner, 'term', term)
renew(open_requests, running_prefix, id, request, now_ms() + lease_ms)
return select(5, read_amounts(amounts))

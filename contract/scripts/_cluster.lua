-- The server within a cluster.
-- @include server

-- Return the server's id; empty without a cluster, or if the user may not ask for it.
local function server_id()
  local id = redis.pcall('CLUSTER', 'MYID')
  return type(id) == 'string' and id or ''
end

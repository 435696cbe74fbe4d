-- Lanes: waiting requests and waiting batch jobs, each with counters and bounds of their own.

-- Name the keys of the lane that starts at this key. Its last keys are the queue and the pace of one
-- tenant; a script for all tenants passes their prefixes instead.
local function lane_at(k, queue, tenant_pace)
  local keys = KEYS
  return {
    active = keys[k], counters = keys[k + 1], last = keys[k + 2], waiting = keys[k + 3],
    doorbell = keys[k + 4], sheddable = keys[k + 5], pace = keys[k + 6], arrivals = keys[k + 7],
    full = keys[k + 8], queue = queue or keys[k + 9], tenant_pace = tenant_pace or keys[k + 10],
  }
end

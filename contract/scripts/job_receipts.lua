-- Return the states of jobs, the engine's token counts for them, and the engine's name.
--
-- KEYS[1..] jobs
-- Output for each job {state, completion tokens, prompt tokens, cached tokens, engine}: state 0
-- unknown, 1 waiting (the counts are what earlier attempts delivered), 2 leased (the counts are those
-- of the last report), 3 ended (the counts are final); the engine is that of the last claim, if any
local out = {}
for i, key in ipairs(KEYS) do
  local job = redis.call('HMGET', key, 'worker', 'ended', 'completion', 'prompt', 'cached',
    'engine')
  local state = 0
  if job[2] then
    state = 3
  elseif job[1] == '' then
    state = 1
  elseif job[1] then
    state = 2
  end
  out[i] = {state}
  for field = 3, 5 do out[i][field - 1] = tonumber(job[field] or 0) end
  out[i][5] = job[6] or ''
end
return out

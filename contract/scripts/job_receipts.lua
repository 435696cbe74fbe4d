-- Return the states of jobs, the engine's token counts for them, and the engine's name.
--
-- KEYS jobs
-- Output for each job {state, completion tokens, prompt tokens, cached tokens, engine}: state 0
-- unknown, 1 waiting (the counts are what earlier attempts delivered), 2 leased (the counts of the
-- last report), 3 ended (the counts are final); the engine is that of the last claim, if any
local out = {}
for i, key in ipairs(KEYS) do
  local worker, ended, completion, prompt, cached, engine = unpack(
    redis.call('HMGET', key, 'worker', 'ended', 'completion', 'prompt', 'cached', 'engine'))
  local state = ended and 3 or worker == '' and 1 or worker and 2 or 0
  out[i] = {state, tonumber(completion or 0), tonumber(prompt or 0), tonumber(cached or 0),
    engine or ''}
end
return out

-- Room of a worker's engine, which a claim fills.
--
-- `room` has the free KV-cache tokens and sequences, most_sequences that one job is counted for, the
-- prompt tokens that several jobs may still have (of all lanes, and of this lane), the number of
-- jobs, and the slots for adapters. For shares, it has the tokens and sequences of the
-- whole engine, and what tenants use of them (see _shares).
-- @include shares

local function fits(room, tokens, sequences)
  return tokens <= room.tokens and math.min(sequences, room.most_sequences) <= room.sequences
end

-- Return whether a job with this adapter, or none, needs no slot, has one, or may have one. After the
-- first job that waits for a slot, no job with an adapter may.
local function may_have_slot(room, adapter)
  return not adapter
    or not room.waits_for_slot and (room.has_slot[adapter] or room.free_slots > 0)
end

-- Take the room of a tenant's job. Return nil, or what there is too little of: 'slots', 'share',
-- 'room' or 'prompt tokens'. A job without a slot or a share asks for no room, which others would give
-- up in vain.
local function take(room, tenant, tokens, sequences, prompt_tokens, adapter, share)
  if not may_have_slot(room, adapter) then
    room.waits_for_slot = true
    return 'slots'
  end
  local use, most = nil, nil
  if share then
    use, most = use_within(room, tenant, tonumber(share), tokens, sequences)
    if not use then return 'share' end
    sequences = math.min(sequences, most)
  end
  -- An empty engine accepts any job. Otherwise a job that needs more than the pool would block all
  -- tenants forever.
  local accepts_any = room.is_empty and room.jobs == 0
  if room.lane_prompt_tokens <= 0 or not accepts_any and not fits(room, tokens, sequences) then
    return 'room'
  end
  if room.jobs > 0 and prompt_tokens > room.prompt_tokens then return 'prompt tokens' end
  if adapter and not room.has_slot[adapter] then
    room.free_slots, room.has_slot[adapter] = room.free_slots - 1, true
  end
  if use then use[1], use[2] = use[1] + sequences, use[2] + tokens end
  room.jobs = room.jobs + 1
  room.tokens = room.tokens - tokens
  room.sequences = room.sequences - math.min(sequences, room.most_sequences)
  room.prompt_tokens = room.prompt_tokens - prompt_tokens
  room.lane_prompt_tokens = room.lane_prompt_tokens - prompt_tokens
  return nil
end

-- Leave the room for batch jobs, without what only requests may take.
local function only_for_batch(room, preemptible_tokens, preemptible_sequences, prompt_tokens)
  room.tokens = room.tokens - preemptible_tokens
  room.sequences = room.sequences - preemptible_sequences
  room.is_empty = room.is_empty and preemptible_tokens == '0'
  room.lane_prompt_tokens = prompt_tokens
  for _, use in pairs(room.uses) do use[1], use[2] = use[1] + use[3], use[2] + use[4] end
end

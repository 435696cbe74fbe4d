-- Doorbells: lists on which idle workers block.
-- @include server

-- Wake a worker, unless one is about to wake.
local function ring(doorbell)
  if call('LLEN', doorbell) == 0 then call('RPUSH', doorbell, 1) end
end

-- Wake one worker, whose doorbell expires if the worker is gone.
local function ring_own(doorbell)
  ring(doorbell)
  call('PEXPIRE', doorbell, 10000)
end

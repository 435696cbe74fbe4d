"""Lua scripts of Idempotency-Keys: one file for each transition, as in `contract.scripts`."""

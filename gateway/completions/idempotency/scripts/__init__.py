"""Lua scripts for Idempotency-Keys: one file per transition, as in `contract.scripts`."""

"""Idempotency-Keys: map each key to the request that it belongs to."""

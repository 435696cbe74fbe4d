"""Requests that a client may repeat: which request an Idempotency-Key stands for."""

"""Authentication of requests: API keys, JWTs, and their revocation."""

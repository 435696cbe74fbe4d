"""Who a request acts as: API keys, JWTs, and what happens when they are revoked."""

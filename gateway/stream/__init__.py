"""Room 10: replies become server-sent events, or one body."""

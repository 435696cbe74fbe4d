"""Limits and money: what a request may use is reserved before it is queued, and settled when it has ended."""

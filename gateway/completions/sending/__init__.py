"""Delivery of responses: bodies and event streams to connected clients."""

"""Alerts about limits and credits, sent to webhooks."""

"""Limits and their current use."""

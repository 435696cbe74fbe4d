"""Requests that wait or run now."""

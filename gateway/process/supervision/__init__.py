"""Processes that this one starts, watches, restarts and stops."""

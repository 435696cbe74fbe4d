"""Batches: files of requests that run when no other request waits.

`sluice jobs` validates, feeds and finishes batches; gateways run their lines. SQL stores the
progress, so any process continues after another one died.
"""

"""Threads and fair scheduling of processor time."""

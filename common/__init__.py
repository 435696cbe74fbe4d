"""Utilities of every process."""

"""Sampling parameters."""

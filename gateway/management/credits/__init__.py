"""Prepaid credits."""

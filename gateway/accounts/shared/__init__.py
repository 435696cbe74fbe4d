"""Checks, fields and parameters of several resources."""

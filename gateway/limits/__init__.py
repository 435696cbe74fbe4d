"""Quota and prepaid credit: reservation of a request's maximum usage, and its settlement."""

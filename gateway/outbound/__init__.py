"""Connections to what customers name: only to checked addresses."""

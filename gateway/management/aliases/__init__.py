"""Aliases of models."""

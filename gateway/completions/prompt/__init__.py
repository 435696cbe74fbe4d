"""Prompts: convert them to token ids and fit them into the context window."""

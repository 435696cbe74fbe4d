"""Structured output and tools: JSON schemas, grammars, choices."""

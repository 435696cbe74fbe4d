"""Parsing of chat responses, token by token: reasoning, tool calls, and content."""

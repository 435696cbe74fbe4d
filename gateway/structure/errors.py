"""Errors for rejected structures and tools."""


class RefusedError(Exception):
    """A structure is invalid or too large. The message, for the client, omits the parameter."""


class ToolRefusedError(RefusedError):
    """A tool is invalid or exceeds a limit."""

"""Errors for rejected structures and tools."""


class RefusedError(Exception):
    """A structure is invalid or exceeds a limit.

    The message is for the client and does not name the parameter.
    """


class ToolRefusedError(RefusedError):
    """A tool is invalid or exceeds a limit."""

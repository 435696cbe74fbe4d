"""Why a structure is refused."""


class RefusedError(Exception):
    """A structure is wrong or exceeds a bound. The message is for the client, without the parameter."""


class ToolRefusedError(RefusedError):
    """A tool is wrong or exceeds a bound."""

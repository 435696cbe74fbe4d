"""Errors for rejected structures and tools."""


class RefusedError(Exception):
    """A structure or a tool is invalid or exceeds a limit.

    The message is for the client and does not name the parameter.
    """

    def __init__(self, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.param = param
        """What the message is about, such as `tools[0].function.parameters`; "" for the
        structure."""

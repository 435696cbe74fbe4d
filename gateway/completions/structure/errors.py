"""Errors for rejected structures and tools."""


class RefusedError(Exception):
    """A structure or a tool is invalid or exceeds a limit.

    The message is for the client and does not name the parameter.
    """

    def __init__(self, message: str, *, param: str = "", is_final: bool = False) -> None:
        super().__init__(message)
        self.param = param
        """What the message is about, such as `tools[0].function.parameters`; "" for the
        structure."""
        self.is_final = is_final
        """Whether leaving out a part of the schema does not help: no text matches it."""

    def within(self, place: str) -> "RefusedError":
        """Return the error with the place of the schema that its `param` is a path in."""
        return RefusedError(str(self), param=place + self.param, is_final=self.is_final)

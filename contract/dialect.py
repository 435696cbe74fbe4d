"""Names of the API dialects.

They are part of the contract because a worker announces the dialect of its model. Settings and the
database use these names too. Only the gateway's `dialects` package defines what each one means.
"""

from enum import StrEnum


class Dialect(StrEnum):
    """Name of a dialect, as in the header `X-Api-Dialect`."""

    OPENAI = "openai"
    FIREWORKS = "fireworks"
    FIREWORKS_2026 = "fireworks-2026"
    LLAMACPP = "llamacpp"
    LLAMACPP_2026 = "llamacpp-2026"
    MISTRALRS = "mistralrs"
    OMLX = "omlx"
    VLLM = "vllm"

    # Enum computes the hash in Python, several times for each request.
    __hash__ = str.__hash__

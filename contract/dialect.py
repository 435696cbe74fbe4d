"""The names of the dialects in which the API is spoken.

They stand in the contract because a worker announces the dialect of its model, settings and the database
name them, and only the gateway's `dialects` knows what each one means.
"""

from enum import StrEnum


class Dialect(StrEnum):
    """Names of the dialects, as in the header `X-Api-Dialect`."""

    OPENAI = "openai"
    FIREWORKS = "fireworks"
    FIREWORKS_2026 = "fireworks-2026"
    LLAMACPP = "llamacpp"
    LLAMACPP_2026 = "llamacpp-2026"
    MISTRALRS = "mistralrs"
    OMLX = "omlx"
    VLLM = "vllm"

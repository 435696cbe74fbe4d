"""Audio files in requests: decode them in processes of their own, within limits."""

import msgspec


class Outcome(msgspec.Struct, omit_defaults=True):
    """What became of a file."""

    samples: list[int] = []
    """Samples of each clip."""
    refusal: str = ""
    """Continues a sentence that begins with the name of the parameter; empty if it is decoded."""

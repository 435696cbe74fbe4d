"""Messages between the gateway and its sandboxes: msgpack with a four-byte length prefix."""

import struct
from typing import Any, Final

import msgspec

from gateway.completions.structure.constraint import Constraint

LENGTH: Final = struct.Struct("<I")


class Tokenizer(msgspec.Struct, frozen=True, tag=True):
    """A tokenizer for the sandbox to keep, by the digest of its file."""

    digest: str
    file: bytes
    eos_token_ids: list[int]
    vocabulary_size: int


class CompileTask(msgspec.Struct, frozen=True, tag=True):
    """A constraint to compile for a tokenizer."""

    digest: str
    constraint: bytes
    """An encoded `Constraint`; only the sandbox decodes it, where a failure does no harm."""


class Template(msgspec.Struct, frozen=True, tag=True):
    """A chat template to try out."""

    source: str


class Verdict(msgspec.Struct, frozen=True):
    """Result of an order: a grammar, a rejection, or neither if nothing was compiled."""

    grammar: str = ""
    refusal: str = ""
    """Why the structure or template was rejected; empty if it was not."""
    param: str = ""
    """What the refusal is about; empty for the structure or template as a whole."""
    lacks_tokenizer: bool = False
    unenforced: list[str] = []
    """Places in the body of what is not enforced of schemas."""


Order = Tokenizer | CompileTask | Template

encode = msgspec.msgpack.Encoder().encode
decode_order: Any = msgspec.msgpack.Decoder(Order).decode
decode_verdict = msgspec.msgpack.Decoder(Verdict).decode
decode_constraint = msgspec.msgpack.Decoder(Constraint).decode

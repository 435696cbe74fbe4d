"""What the gateway and its sandboxes say to each other: msgpack, four bytes of length before each."""

import struct
from typing import Any, Final

import msgspec

from gateway.structure.constraint import Constraint

LENGTH: Final = struct.Struct("<I")


class Tokenizer(msgspec.Struct, frozen=True, tag=True):
    """A tokenizer to keep, under the digest of its file."""

    digest: str
    file: bytes
    eos_token_ids: list[int]
    vocabulary_size: int


class Task(msgspec.Struct, frozen=True, tag=True):
    """Something to compile for a tokenizer."""

    digest: str
    constraint: bytes
    """A `Constraint`, encoded, so that it is read only where that hurts nobody."""


class Template(msgspec.Struct, frozen=True, tag=True):
    """A chat template to try out."""

    source: str


class Verdict(msgspec.Struct, frozen=True):
    """What came of an order: a grammar, a refusal, or neither if nothing was compiled."""

    grammar: str = ""
    refusal: str = ""
    """Why the structure or template is refused; empty if it is not."""
    is_about_tools: bool = False
    """Whether a tool is refused."""
    lacks_tokenizer: bool = False


Order = Tokenizer | Task | Template

encode = msgspec.msgpack.Encoder().encode
decode_order: Any = msgspec.msgpack.Decoder(Order).decode
decode_verdict = msgspec.msgpack.Decoder(Verdict).decode
decode_constraint = msgspec.msgpack.Decoder(Constraint).decode

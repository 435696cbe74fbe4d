"""What the gateway and its sandboxes say to each other: msgpack, four bytes of length before each."""

import struct
from typing import Any, Final

import msgspec

from gateway.dialects.request import Structure, ToolUse

LENGTH: Final = struct.Struct("<I")


class Tokenizer(msgspec.Struct, frozen=True, tag=True):
    """A tokenizer to keep, under the digest of its file."""

    digest: str
    file: bytes
    eos_token_ids: list[int]
    vocabulary_size: int


class Task(msgspec.Struct, frozen=True, tag=True):
    """A structure or tools to compile for a tokenizer."""

    digest: str
    subject: bytes
    """A `Structure` or a `ToolUse`, encoded, so that it is read only where that hurts nobody."""
    is_tools: bool


class Verdict(msgspec.Struct, frozen=True):
    """What came of a message: a grammar, a refusal, or neither if nothing was compiled."""

    grammar: str = ""
    refusal: str = ""
    """Why the structure is refused; empty if it is not."""
    lacks_tokenizer: bool = False


encode = msgspec.msgpack.Encoder().encode
decode_order: Any = msgspec.msgpack.Decoder(Tokenizer | Task).decode
decode_verdict = msgspec.msgpack.Decoder(Verdict).decode
decode_structure = msgspec.msgpack.Decoder(Structure).decode
decode_tool_use = msgspec.msgpack.Decoder(ToolUse).decode

"""Entries of an answer's journal: what its owners have received of its jobs, in that order."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from contract.messages import Delta, JobFailed, JobFinished, JobStarted, PromptScored
from gateway.dispatch.generation import JobMessage

_KINDS: Final[tuple[type[JobMessage], ...]] = (
    Delta,
    PromptScored,
    JobStarted,
    JobFinished,
    JobFailed,
)
_KIND_OF: Final = {kind: number for number, kind in enumerate(_KINDS)}
_DECODERS: Final = tuple(msgspec.msgpack.Decoder(kind).decode for kind in _KINDS)


class Received(NamedTuple):
    """One message for one of the request's prompts."""

    prompt_index: int
    message: JobMessage


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    through: str
    received: list[tuple[int, int, msgspec.Raw]]
    """Index of the prompt, kind of message, message."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Entry).decode


def encode_entry(received: Sequence[tuple[int, JobMessage]], through: str) -> bytes:
    """Return an entry for some `Received`. `through` is the last entry of the owner's reply stream that has been applied."""
    return _encode(
        (through, [(index, _KIND_OF[type(message)], message) for index, message in received])
    )


def decode_entry(content: bytes) -> tuple[list[Received], str]:
    """Return what an entry was made of. Raises msgspec.MsgspecError."""
    entry = _decode(content)
    received = [Received(index, _DECODERS[kind](raw)) for index, kind, raw in entry.received]
    return received, entry.through

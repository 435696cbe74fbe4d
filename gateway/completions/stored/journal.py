"""Journal of a response: entries of the messages that its owners received, in order."""

import zlib
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from contract.messages import Delta, JobFailed, JobFinished, JobMessage, JobStarted, PromptScored

_KINDS: Final[tuple[type[JobMessage], ...]] = (
    Delta,
    PromptScored,
    JobStarted,
    JobFinished,
    JobFailed,
)
_KIND_OF: Final = {kind: number for number, kind in enumerate(_KINDS)}
_DECODERS: Final = tuple(msgspec.msgpack.Decoder(kind).decode for kind in _KINDS)

MESSAGES_OF_ENTRY: Final = 64
"""Messages in one entry: more than most responses receive between two writes.

Readers decode one entry at a time.
"""
COMPRESSED_BYTES: Final = 16_384
"""Shorter entries are not compressed: most streams write short entries, often."""
LARGE_BYTES: Final = 262_144
"""Longer entries are not compressed, because that would block the event loop for milliseconds."""
SLICE_BYTES: Final = 32_768
"""Approximate bytes decoded before other tasks run: log-probabilities take long."""
_ZLIB: Final = b"x"
"""The first byte of the zlib format. No uncompressed entry or head begins with it."""


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


def encode_message(prompt_index: int, message: JobMessage) -> msgspec.Raw:
    """Return one message for one of the request's prompts, for `encode_entries`.

    Encode each message when it arrives: the decoded messages of all streams take megabytes, and
    would evict what every token needs from the processor's caches.
    """
    return msgspec.Raw(_encode((prompt_index, _KIND_OF[type(message)], message)))


def encode_entries(received: Sequence[msgspec.Raw], through: str) -> list[bytes]:
    """Return the entries for the messages received since the last write, to be written together.

    `through` is the last entry of the owner's reply stream that has been applied.
    """
    starts = range(0, len(received), MESSAGES_OF_ENTRY)
    return [_entry(received[start : start + MESSAGES_OF_ENTRY], through) for start in starts]


def _entry(received: Sequence[msgspec.Raw], through: str) -> bytes:
    content = _encode((through, received))
    return content if len(content) > LARGE_BYTES else compressed(content)


def compressed(content: bytes) -> bytes:
    """Return content for storage, compressed if that saves space."""
    return content if len(content) < COMPRESSED_BYTES else zlib.compress(content, 1)


def restored(content: bytes) -> bytes:
    """Return stored content, decompressed. Raises zlib.error."""
    return zlib.decompress(content) if is_compressed(content) else content


def is_compressed(content: bytes) -> bool:
    """Whether stored content is compressed."""
    return content.startswith(_ZLIB)


def decode_slices(content: bytes) -> Iterator[list[Received]]:
    """Yield the content of an entry in slices, decoded on demand. Raises msgspec.MsgspecError."""
    some: list[Received] = []
    size = 0
    for index, kind, raw in _decode(restored(content)).received:
        if some and size + len(raw) > SLICE_BYTES:
            yield some
            some, size = [], 0
        some.append(Received(index, _DECODERS[kind](raw)))
        size += len(raw)
    yield some


def decode_entry(content: bytes) -> tuple[list[Received], str]:
    """Return the messages and the `through` of an entry. Raises msgspec.MsgspecError."""
    entry = _decode(restored(content))
    received = [Received(index, _DECODERS[kind](raw)) for index, kind, raw in entry.received]
    return received, entry.through

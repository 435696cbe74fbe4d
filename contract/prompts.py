"""Token ids of prompts, packed: a prompt may have 200,000 of them.

As Python integers they would take nine times the memory and milliseconds to encode. On the wire
they are an array of MessagePack, as in every release, so that releases can run side by side.

Each turn of a chat repeats the turns before. The tokens of a long prompt are therefore stored in
chunks, whose names depend on all tokens through their ends. A job has the names and the rest.
"""

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array

CHUNK_TOKENS: Final = 4_096
CHUNK_BYTES: Final = 4 * CHUNK_TOKENS
NAME_BYTES: Final = 16

_ARRAY: Final = 0xDD
"""MessagePack's mark of an array with a length of 32 bits."""
_INTEGER: Final = 0xCE
"""MessagePack's mark of an unsigned integer of 32 bits."""
_PAIR: Final = 0x92
_BYTES: Final = frozenset({0xC4, 0xC5, 0xC6})
"""MessagePack's marks of an array of two, and of bytes."""
_decode_pair = msgspec.msgpack.Decoder(tuple[bytes, msgspec.Raw]).decode


def packed(token_ids: Iterable[int]) -> TokenIds:
    """Return token ids as unsigned integers of 32 bits. Raises OverflowError for others."""
    return TokenIds("I", token_ids)


def encode_ids(token_ids: TokenIds) -> msgspec.Raw:
    """Return the array of MessagePack, in which each integer has the same size."""
    number, content = len(token_ids), token_ids.tobytes()
    body = bytearray([_INTEGER]) * (5 * number)
    for byte in range(4):
        body[1 + byte :: 5] = content[3 - byte :: 4]
    return msgspec.Raw(bytes([_ARRAY]) + number.to_bytes(4, "big") + body)


def decode_prompt(encoded: msgspec.Raw) -> tuple[bytes, TokenIds]:
    """Return the names of chunks, empty without chunks, and the tokens that follow them.

    Raises msgspec.MsgspecError.
    """
    content = bytes(encoded)
    if content[0] == _PAIR and content[1] in _BYTES:
        names, rest = _decode_pair(content)
        return names, _decode_ids(bytes(rest))
    return b"", _decode_ids(content)


def _decode_ids(content: bytes) -> TokenIds:
    body = content[5:]
    if content[0] != _ARRAY or body[::5].count(_INTEGER) * 5 != len(body):
        raise msgspec.ValidationError("token ids are no array of 32-bit integers")
    ids = bytearray(len(body) // 5 * 4)
    for byte in range(4):
        ids[3 - byte :: 4] = body[1 + byte :: 5]
    return TokenIds("I", bytes(ids))


def prefix_hash(cache_salt: str) -> "hashlib.blake2b":
    """Return the hash of an empty prefix; update it with the bytes of `TokenIds`.

    The cache salt keys it, so tenants share no digest.
    """
    return hashlib.blake2b(digest_size=NAME_BYTES, key=cache_salt.encode()[:64])


Digests = Mapping[int, bytes]
"""Digests of a prompt's first tokens, by their number."""


def digests_at(cache_salt: str, token_ids: TokenIds, ends: Iterable[int]) -> Digests:
    """Return the digests of a prompt through each end, in one pass over its tokens."""
    content, width = memoryview(token_ids).cast("B"), token_ids.itemsize
    running, done, found = prefix_hash(cache_salt), 0, dict[int, bytes]()
    for end in sorted(ends):
        running.update(content[done * width : end * width])
        found[end], done = running.digest(), end
    return found


def chunk_ends(tokens: int) -> list[int]:
    """Return where the chunks of a prompt of so many tokens end, and the prompt itself."""
    return [*range(CHUNK_TOKENS, tokens, CHUNK_TOKENS), tokens]


def names_of(cache_salt: str, token_ids: TokenIds, digests: Digests | None = None) -> bytes:
    """Return the digests of a prompt through the end of each chunk, and of the whole prompt.

    A digest is also the chunk's name. `digests` may have them already.
    """
    ends = chunk_ends(len(token_ids))
    found = digests_at(cache_salt, token_ids, ends) if digests is None else digests
    return b"".join([found[end] for end in ends])


def chunk_names(names: bytes, rest: TokenIds) -> list[bytes]:
    """Return the names of the chunks alone, which the tokens of `rest` follow."""
    end = len(names) - (NAME_BYTES if rest else 0)
    return [names[start : start + NAME_BYTES] for start in range(0, end, NAME_BYTES)]


def joined(
    cache_salt: str, names: bytes, chunks: Iterable[bytes], rest: TokenIds
) -> TokenIds | None:
    """Return the whole prompt; None if its digest is not the last one of `names`."""
    content = b"".join([*chunks, rest.tobytes()])
    whole = prefix_hash(cache_salt)
    whole.update(content)
    return TokenIds("I", content) if whole.digest() == names[-NAME_BYTES:] else None

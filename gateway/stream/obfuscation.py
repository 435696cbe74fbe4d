"""Padding that hides from onlookers how long the text of a chunk is (OpenAI's `obfuscation`).

Encryption hides what a chunk says, but not its length, and the lengths of tokens betray a text.
"""

import secrets

BLOCK_BYTES = 128
"""Chunks are made this long, or a multiple of it."""

_MEMBER = b',"obfuscation":""'


def padding(chunk_bytes: int) -> bytes:
    """Return the member that makes a chunk of `chunk_bytes` as long as many others."""
    missing = -(chunk_bytes + len(_MEMBER)) % BLOCK_BYTES
    # Random, because a compressing proxy would undo any other padding.
    return _MEMBER[:-1] + secrets.token_hex(missing // 2 + 1)[:missing].encode() + b'"'

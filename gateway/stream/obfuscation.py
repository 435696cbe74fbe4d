"""Obfuscation padding that hides the text length of a chunk (OpenAI's `obfuscation`).

Encryption hides the content of a chunk but not its length, and token lengths can reveal the text.
"""

import secrets

BLOCK_BYTES = 128
"""Chunks are padded to a multiple of this length."""

_MEMBER = b',"obfuscation":""'


def padding(chunk_bytes: int) -> bytes:
    """Return the member that pads a chunk of `chunk_bytes` to a multiple of BLOCK_BYTES."""
    missing = -(chunk_bytes + len(_MEMBER)) % BLOCK_BYTES
    # Random, because a compressing proxy would undo any other padding.
    return _MEMBER[:-1] + secrets.token_hex(missing // 2 + 1)[:missing].encode() + b'"'

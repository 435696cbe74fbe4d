"""Token ids of prompts, packed: a prompt may have 200,000 of them.

As Python integers they would take nine times the memory and milliseconds to encode. On the wire
they are an array of MessagePack, as in every release, so that releases can run side by side.
"""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array

_ARRAY: Final = 0xDD
"""MessagePack's mark of an array with a length of 32 bits."""
_INTEGER: Final = 0xCE
"""MessagePack's mark of an unsigned integer of 32 bits."""
_decode_list = msgspec.msgpack.Decoder(list[int]).decode


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


def decode_ids(encoded: msgspec.Raw) -> TokenIds:
    """Return the token ids of an array of MessagePack. Raises msgspec.MsgspecError."""
    content = bytes(encoded)
    body = content[5:]
    if content[0] != _ARRAY or body[::5].count(_INTEGER) * 5 != len(body):
        # An earlier release writes each integer in its shortest form.
        try:
            return packed(_decode_list(content))
        except OverflowError as error:
            raise msgspec.ValidationError(f"token ids: {error}") from None
    ids = bytearray(len(body) // 5 * 4)
    for byte in range(4):
        ids[3 - byte :: 4] = body[1 + byte :: 5]
    return TokenIds("I", bytes(ids))

"""Decode bodies with a `Content-Encoding`, within a limit of their decoded size."""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import brotli
from backports import zstd
from starlette.datastructures import Headers

from gateway.records.errors import (
    BadRequestError,
    PayloadTooLargeError,
    UnsupportedMediaTypeError,
    shown,
)

HEADER: Final = "content-encoding"
PART_BYTES: Final = 65_536
MOST_MEMBERS: Final = 1_024
"""Members of gzip, or frames of Zstandard, in one body."""
_ZSTD_WINDOW_LOG: Final = 23
"""RFC 9659 allows no larger window, of 8 MiB."""
_ERRORS: Final = (zlib.error, brotli.error, zstd.ZstdError, EOFError)


def content_coding(headers: Headers, known: Collection[str]) -> str:
    """Return the coding of a body; empty without one.

    Raises UnsupportedMediaTypeError if it is not one of the known codings.
    """
    if HEADER not in headers:
        return ""
    given = ",".join(headers.getlist(HEADER)).strip().lower()
    coding = "gzip" if given == "x-gzip" else given
    if coding in {"", "identity"}:
        return ""
    if coding not in known:
        raise UnsupportedMediaTypeError(
            f"'Content-Encoding' must be {' or '.join((*known, 'identity'))}. "
            f"Given: {shown(given)}."
        )
    return coding


def decode(content: bytes, coding: str, *, most_bytes: int) -> bytes:
    """Return a whole body decoded.

    Raises PayloadTooLargeError if it has more than `most_bytes`, before it decodes much more, and
    BadRequestError if it is incomplete or invalid.
    """
    decoded = bytearray()
    try:
        for part in _DECODERS[coding](content):
            decoded += part
            if len(decoded) > most_bytes:
                raise PayloadTooLargeError(
                    f"The decoded body must have at most {most_bytes} bytes."
                )
    except _ERRORS:
        raise BadRequestError(
            f"The body is not complete {coding}, which 'Content-Encoding' names."
        ) from None
    return bytes(decoded)


def _members(content: bytes, new: Callable[[], Any]) -> Iterator[bytes]:
    """Decode the members of a body: some encoders write several. `new` decodes one."""
    decoder, members = new(), 1
    for start in range(0, len(content), PART_BYTES):
        # Not more: decoders copy what they leave, even after a member of a few bytes.
        piece = content[start : start + PART_BYTES]
        while piece or not decoder.eof:
            if decoder.eof:
                decoder, members = new(), members + 1
                if members > MOST_MEMBERS:
                    raise BadRequestError(
                        "A body with a 'Content-Encoding' must have at most "
                        f"{MOST_MEMBERS} members or frames."
                    )
            part = decoder.decompress(piece, PART_BYTES)
            yield part
            piece = getattr(decoder, "unconsumed_tail", b"") or decoder.unused_data
            if not part and not piece:
                break
    if content and not decoder.eof:
        raise EOFError


def _gzip(content: bytes) -> Iterator[bytes]:
    return _members(content, lambda: zlib.decompressobj(zlib.MAX_WBITS | 16))


def _deflate(content: bytes) -> Iterator[bytes]:
    # Some clients leave out the header.
    has_header = content[:1] and content[0] & 0x0F == zlib.DEFLATED
    bits = zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
    return _members(content, lambda: zlib.decompressobj(bits))


def _brotli(content: bytes) -> Iterator[bytes]:
    decoder = brotli.Decompressor()
    part = decoder.process(content, output_buffer_limit=PART_BYTES)
    while part:
        yield part
        part = (
            b"" if decoder.is_finished() else decoder.process(b"", output_buffer_limit=PART_BYTES)
        )
    if not decoder.is_finished():
        raise EOFError


def _zstd(content: bytes) -> Iterator[bytes]:
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
    return _members(content, lambda: zstd.ZstdDecompressor(options=options))


_DECODERS: Final[Mapping[str, Callable[[bytes], Iterator[bytes]]]] = {
    "gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}
CODINGS: Final = tuple(_DECODERS)

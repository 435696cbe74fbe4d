"""Decode bodies with a `Content-Encoding`, within a limit of their decoded size."""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import brotli  # type: ignore[import-untyped]
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


def _gzip(content: bytes, bits: int = zlib.MAX_WBITS | 16) -> Iterator[bytes]:
    while content:  # Some encoders write several members.
        decoder = zlib.decompressobj(bits)
        while part := decoder.decompress(content, PART_BYTES):
            yield part
            content = decoder.unconsumed_tail
        if not decoder.eof:
            raise EOFError
        content = decoder.unused_data


def _deflate(content: bytes) -> Iterator[bytes]:
    # Some clients leave out the header.
    has_header = content[:1] and content[0] & 0x0F == zlib.DEFLATED
    return _gzip(content, zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


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
    while content:
        decoder = zstd.ZstdDecompressor(options=options)
        while not decoder.eof:
            part = decoder.decompress(content, PART_BYTES)
            if not part and decoder.needs_input:
                raise EOFError
            yield part
            content = b""
        content = decoder.unused_data


_DECODERS: Final[Mapping[str, Callable[[bytes], Iterator[bytes]]]] = MappingProxyType(
    {"gzip": _gzip, "deflate": _deflate, "br": _brotli, "zstd": _zstd}
)
CODINGS: Final = tuple(_DECODERS)

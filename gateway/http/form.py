"""Multipart forms with a file, which are parsed while they arrive."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from typing import Final

from fastapi import Request
from python_multipart.multipart import MAX_BOUNDARY_LENGTH, parse_options_header
from starlette.requests import ClientDisconnect

from gateway.http.content_coding import content_coding
from gateway.records.errors import (
    BadRequestError,
    InvalidParameterError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
    must,
    shown,
)

MAX_FIELDS: Final = 32
MAX_FIELD_BYTES: Final = 1024
MAX_HEADER_BYTES: Final = 4096
"""Bytes of the headers of a part, and of the header that has the boundary."""
MAX_FORM_BYTES: Final = 64 * 1024
"""Bytes of a form besides its file."""

_FILE: Final = "file"


class FileForm:
    """A multipart form with one file, which is parsed piece by piece.

    Each field is there at most once, except those whose names end with `[]`, and only the file can
    be long. The content of a part is searched for its boundary by `bytes.find`, so that no byte
    costs a step of Python.
    """

    def __init__(
        self, boundary: bytes, *, known: Collection[str], most_field_bytes: int = MAX_FIELD_BYTES
    ) -> None:
        """Begin a form with a boundary, in which the `known` fields have an effect."""
        self.fields: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {}
        """The values of each field whose name ends with `[]`."""
        self.name: str | None = None
        """Name of the file; None before it."""
        self.is_complete = False
        self._known = known
        self._most_field_bytes = most_field_bytes
        self._delimiter = b"\r\n--" + boundary
        # The delimiter of the first part may have no line before it.
        self._rest = bytearray(b"\r\n")
        self._field: str | None = None
        """The field of the current part; None before the first."""
        self._value = bytearray()
        self._read: Callable[[list[bytes]], bool] = self._read_content

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that have no effect."""
        return [name for name in (*self.fields, *self.lists) if name not in self._known]

    def feed(self, content: bytes) -> bytes:
        """Parse the next bytes; return the bytes of the file in them. Raises an ApiError."""
        found: list[bytes] = []
        if not self.is_complete:
            self._rest += content
            while self._read(found):
                pass
        return b"".join(found)

    def _read_content(self, found: list[bytes]) -> bool:
        """Read the content of a part; return whether its end has arrived."""
        end = self._rest.find(self._delimiter)
        is_whole = end >= 0
        size = end if is_whole else max(len(self._rest) - len(self._delimiter) + 1, 0)
        self._take(bytes(self._rest[:size]), found)
        del self._rest[: size + len(self._delimiter) if is_whole else size]
        if is_whole:
            if self._field is not None and self._field != _FILE:
                self._end_field(self._field, _text(self._field, self._value))
            self._read = self._read_boundary
        return is_whole

    def _end_field(self, name: str, value: str) -> None:
        if name.endswith("[]"):
            self.lists.setdefault(name, []).append(value)
        else:
            self.fields[name] = value

    def _read_boundary(self, _found: list[bytes]) -> bool:
        """Read what follows a delimiter: the end of the form, or of the line."""
        mark = self._rest[:2]
        self.is_complete = mark == b"--"
        if self.is_complete or len(mark) < 2:
            return False
        if mark != b"\r\n":
            raise _malformed("a boundary does not end its line")
        # The line break stays, so that each header begins with one.
        self._read = self._read_headers
        return True

    def _read_headers(self, _found: list[bytes]) -> bool:
        end = self._rest.find(b"\r\n\r\n")
        if (len(self._rest) if end < 0 else end) > MAX_HEADER_BYTES:
            raise _malformed(f"the headers of a part have more than {MAX_HEADER_BYTES} bytes")
        if end < 0:
            return False
        headers = bytes(self._rest[:end])
        del self._rest[: end + 4]
        disposition = b""
        for header in headers.split(b"\r\n")[1:]:
            name, colon, value = header.partition(b":")
            if not colon:
                raise _malformed("a header of a part has no colon")
            if name.strip().lower() == b"content-disposition":
                disposition = value.strip()
        self._begin_part(disposition)
        self._read = self._read_content
        return True

    def _begin_part(self, disposition: bytes) -> None:
        _, options = parse_options_header(disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        number = len(self.fields) + sum(map(len, self.lists.values()))
        is_single = name == _FILE or (name in self._known and not name.endswith("[]"))
        if number >= MAX_FIELDS and not is_single:
            raise InvalidParameterError(
                f"The form must have at most {MAX_FIELDS} fields. Given: {shown(name)} too.",
                param=name[:MAX_FIELD_BYTES] or None,
            )
        if name in self.fields or (name == _FILE and self.name is not None):
            raise InvalidParameterError(f"The form has more than one '{name}'.", param=name)
        if name == _FILE:
            if b"filename" not in options:
                raise InvalidParameterError("'file' must be a file.", param=_FILE)
            self.name = _text(_FILE, options[b"filename"])
        self._field, self._value = name, bytearray()

    def _take(self, content: bytes, found: list[bytes]) -> None:
        if self._field == _FILE:
            found.append(content)
            return
        if self._field is None:
            if content.strip(b"\r\n"):
                raise _malformed("it does not begin with its boundary")
            return
        self._value += content
        if len(self._value) > self._most_field_bytes:
            raise must(
                self._field,
                f"have at most {self._most_field_bytes} bytes",
                self._value.decode(errors="replace"),
            )


async def file_pieces(
    request: Request, form: FileForm, *, most_bytes: int, too_large: str, seconds: float
) -> AsyncIterator[bytes]:
    """Read a form; yield the bytes of its file as they arrive.

    Raises PayloadTooLargeError with the message `too_large` for a file of more than `most_bytes`,
    RequestTimeoutError if no part of the form arrives within `seconds`, ClientDisconnect, and
    BadRequestError.
    """
    received = size = 0
    async for content in _body(request, seconds):
        found = form.feed(content)
        received, size = received + len(content), size + len(found)
        if received - size > MAX_FORM_BYTES:
            raise PayloadTooLargeError(
                f"The form must have at most {MAX_FORM_BYTES} bytes besides the file."
            )
        if size > most_bytes:
            raise PayloadTooLargeError(too_large)
        if found:
            yield found
    if not form.is_complete:
        raise BadRequestError("The form is incomplete.")


async def _body(request: Request, seconds: float) -> AsyncIterator[bytes]:
    """Yield the bytes of the body as they arrive. Raises RequestTimeoutError, ClientDisconnect."""
    has_more = True
    while has_more:
        try:
            async with asyncio.timeout(seconds):
                message = await request.receive()
        except TimeoutError:
            raise RequestTimeoutError(
                f"No part of the body arrived within {seconds:g} seconds."
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        has_more = message.get("more_body", False)
        if content := message.get("body", b""):
            yield content


def boundary_of(request: Request) -> bytes:
    """Return the boundary of a request's form. Raises an ApiError if its body is no form."""
    content_coding(request.headers, known=())
    header = request.headers.get("content-type", "")
    kind, options = parse_options_header(header[:MAX_HEADER_BYTES])
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise UnsupportedMediaTypeError(
            "'Content-Type' must be multipart/form-data with a boundary."
        )
    if len(boundary) > MAX_BOUNDARY_LENGTH:
        raise InvalidParameterError(
            f"The boundary in 'Content-Type' must have at most {MAX_BOUNDARY_LENGTH} bytes. "
            f"Given: {len(boundary)}.",
            param="Content-Type",
        )
    return boundary


def _text(param: str, value: bytes | bytearray) -> str:
    """Return the text of a field. Raises InvalidParameterError."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise must(param, "be UTF-8", value.decode(errors="replace")) from None


def _malformed(reason: str) -> BadRequestError:
    return BadRequestError(f"The form is malformed: {reason}.")

"""Upload of a file: parse and check a multipart form while it arrives, and store it in parts."""

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import timedelta
from typing import Final

from fastapi import Request
from python_multipart.multipart import MAX_BOUNDARY_LENGTH, parse_options_header
from starlette.requests import ClientDisconnect

from gateway.batches.files.service import Bound, FileService, Owner, read_retention
from gateway.dialects.parameters import reject_ignored
from gateway.http.allowances import Intake
from gateway.http.content_coding import content_coding
from gateway.platform.concurrency.large_work import INLINE_SIZE, LargeWork
from gateway.platform.database.engine import Database
from gateway.platform.settings import Settings
from gateway.records.batches import File, FilePurpose
from gateway.records.errors import (
    BadRequestError,
    InvalidParameterError,
    MissingParameterError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
    UnsupportedParameterError,
    must,
    shown,
)

PART_BYTES: Final = 8 * 1024 * 1024
"""Bytes of an object, and thus of an upload in memory."""
MAX_FIELDS: Final = 32
MAX_FIELD_BYTES: Final = 1024
MAX_NAME_CHARACTERS: Final = 255
MAX_HEADER_BYTES: Final = 4096
"""Bytes of the headers of a part, and of the header that has the boundary."""
MAX_FORM_BYTES: Final = 64 * 1024
"""Bytes of a form besides its file."""
SLICE_BYTES: Final = 65_536
"""Bytes that are checked at a time: the decoder blocks all other threads."""
BOM: Final = codecs.BOM_UTF8

_FILE: Final = "file"
_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_ANCHOR: Final = "created_at"


class LineChecker:
    """Checks the lines of a file while it arrives. `feed` raises InvalidParameterError."""

    def __init__(self, bound: Bound, *, most_bytes_of_line: int) -> None:
        self.lines = 0
        """Lines so far, with the one that has not ended."""
        self._bound = bound
        self._most_bytes = most_bytes_of_line
        self._ended = 0
        self._bytes_of_line = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def feed(self, content: bytes) -> None:
        """Check the next bytes."""
        for start in range(0, len(content), SLICE_BYTES):
            self._feed(content[start : start + SLICE_BYTES])

    def _feed(self, content: bytes) -> None:
        if self._ended == 0 and self._bytes_of_line == 0 and content.startswith(BOM):
            raise _bad_line(1, "begins with a byte order mark. Save the file as UTF-8 without it")
        try:
            self._decoder.decode(content)
        except UnicodeDecodeError as error:
            # The bytes of the error may include some from before.
            before = content[: max(error.start - (len(error.object) - len(content)), 0)]
            line = self._ended + before.count(b"\n") + 1
            raise _bad_line(line, "is not valid UTF-8") from None
        start = 0
        while (end := content.find(b"\n", start)) >= 0:
            self._check(self._bytes_of_line + end - start)
            self._ended += 1
            self._bytes_of_line = 0
            start = end + 1
        self._bytes_of_line += len(content) - start
        self._check(self._bytes_of_line)
        self.lines = self._ended + (self._bytes_of_line > 0)
        if self.lines > self._bound.most:
            raise InvalidParameterError(
                f"{self._bound.message} Line {self._bound.most + 1} is one too many.", param=_FILE
            )

    def finish(self) -> None:
        """Check the end of the file."""
        try:
            self._decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            raise _bad_line(self._ended + 1, "is not valid UTF-8") from None
        if self.lines == 0:
            raise InvalidParameterError("The file is empty.", param=_FILE)

    def _check(self, size: int) -> None:
        if size > self._most_bytes:
            reason = f"has more than {self._most_bytes} bytes, the limit of a request"
            raise _bad_line(self._ended + 1, reason)


class UploadForm:
    """A multipart form with one file, which is parsed piece by piece.

    Each field is there at most once, and only the file can be long. The content of a part is
    searched for its boundary by `bytes.find`, so that no byte costs a step of Python.
    """

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.name: str | None = None
        """Name of the file; None before it."""
        self.is_complete = False
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
        return [name for name in self.fields if name not in _FIELDS]

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
                self.fields[self._field] = _text(self._field, self._value)
            self._read = self._read_boundary
        return is_whole

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
        if name not in (_FILE, *_FIELDS) and len(self.fields) >= MAX_FIELDS:
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
        if len(self._value) > MAX_FIELD_BYTES:
            raise must(
                self._field,
                f"have at most {MAX_FIELD_BYTES} bytes",
                self._value.decode(errors="replace"),
            )


class Uploads:
    """Receives the forms of uploads."""

    def __init__(
        self, settings: Settings, database: Database, intake: Intake, large_work: LargeWork
    ) -> None:
        self._settings = settings
        self._files = FileService(settings, database)
        self._intake = intake
        self._large_work = large_work

    async def receive(
        self,
        request: Request,
        owner: Owner,
        *,
        is_strict: bool,
        admit: Callable[[Mapping[str, str]], None] = lambda _fields: None,
    ) -> tuple[File, list[str]]:
        """Read the form of a request and store its file. After an error nothing is stored.

        Return the file and the fields of the form without effect; if it `is_strict`, refuse them.
        `admit` gets the fields before the file, and may raise an ApiError. Raises an ApiError or
        ClientDisconnect.
        """
        form = UploadForm(_boundary(request))
        bytes_bound, lines_bound = await self._files.require_room(owner.tenant_id)
        checker = LineChecker(lines_bound, most_bytes_of_line=self._settings.max_body_bytes)
        with self._intake.body_of(owner.tenant_id) as hold:
            # An upload holds this much, however long it is.
            hold(PART_BYTES)
            file = await self._files.begin_upload(owner)
            try:
                parts = await self._store(request, file, form, checker, bytes_bound, admit)
                _check_fields(form)
                if is_strict:
                    reject_ignored(form.ignored)
                checker.finish()
                retention = _read_retention(form.fields)
                file = await self._files.finish_upload(
                    file, parts, name=form.name or "", lines=checker.lines, retention=retention
                )
                return file, form.ignored
            except BaseException:
                await asyncio.shield(self._files.remove(file.id))
                raise

    async def _store(
        self,
        request: Request,
        file: File,
        form: UploadForm,
        checker: LineChecker,
        bound: Bound,
        admit: Callable[[Mapping[str, str]], None],
    ) -> list[tuple[str, int]]:
        """Store the file of a form in objects; return their keys and sizes."""
        parts: list[tuple[str, int]] = []
        held, size, received, is_admitted = bytearray(), 0, 0, False
        beside = self._large_work.of(file.tenant_id, size=INLINE_SIZE + 1)

        async def put(content: bytes) -> None:
            await beside(lambda: checker.feed(content))
            parts.append((await self._files.put(file.id, content), len(content)))

        async for content in _body(request, self._settings.body_timeout.total_seconds()):
            found = form.feed(content)
            received, size = received + len(content), size + len(found)
            if form.name is not None and not is_admitted:
                admit(form.fields)
                is_admitted = True
            if received - size > MAX_FORM_BYTES:
                raise PayloadTooLargeError(
                    f"The form must have at most {MAX_FORM_BYTES} bytes besides the file."
                )
            if size > bound.most:
                raise PayloadTooLargeError(bound.message)
            held += found
            if len(held) >= PART_BYTES:
                await put(bytes(held))
                held.clear()
        if not form.is_complete:
            raise BadRequestError("The form is incomplete.")
        if held:
            await put(bytes(held))
        return parts


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


def _boundary(request: Request) -> bytes:
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


def _check_fields(form: UploadForm) -> None:
    if form.name is None:
        raise MissingParameterError(_FILE)
    if len(form.name) > MAX_NAME_CHARACTERS or not form.name.isprintable():
        raise InvalidParameterError(
            f"The name of the file must have at most {MAX_NAME_CHARACTERS} printable characters. "
            f"Given: {shown(form.name)}.",
            param=_FILE,
        )
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise MissingParameterError("purpose")
    if purpose != FilePurpose.BATCH:
        raise must("purpose", f"be {FilePurpose.BATCH}", purpose)


def _read_retention(fields: dict[str, str]) -> timedelta | None:
    for name in fields.keys() - {*_FIELDS}:
        if name.startswith("expires_"):
            reason = "Use 'expires_after[anchor]' and 'expires_after[seconds]'."
            raise UnsupportedParameterError(f"{shown(name)} is not supported. {reason}", param=name)
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != _ANCHOR:
        raise must("expires_after[anchor]", f"be {_ANCHOR}", anchor)
    param = "expires_after[seconds]"
    if seconds is None or not (seconds.isascii() and seconds.isdigit()):
        raise must(param, "be a number of seconds", seconds)
    return read_retention(int(seconds[:20]), param=param)


def _text(param: str, value: bytes | bytearray) -> str:
    """Return the text of a field. Raises InvalidParameterError."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise must(param, "be UTF-8", value.decode(errors="replace")) from None


def _malformed(reason: str) -> BadRequestError:
    return BadRequestError(f"The form is malformed: {reason}.")


def _bad_line(number: int, reason: str) -> InvalidParameterError:
    return InvalidParameterError(f"Line {number} of the file {reason}.", param=_FILE)

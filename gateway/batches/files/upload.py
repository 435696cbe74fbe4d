"""Upload of a file: parse and check a multipart form while it arrives, and store it in parts."""

import asyncio
import codecs
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final

from fastapi import Request

from gateway.batches.files.service import Bound, FileService, Owner, read_retention
from gateway.dialects.parameters import reject_ignored
from gateway.http.allowances import BodyBytes
from gateway.http.form import FileForm, boundary_of, file_pieces
from gateway.platform.concurrency.large_work import INLINE_SIZE, LargeWork
from gateway.platform.database.engine import Database
from gateway.platform.settings import Settings
from gateway.records.batches import File, FilePurpose
from gateway.records.errors import (
    InvalidParameterError,
    MissingParameterError,
    UnsupportedParameterError,
    must,
    shown,
)

PART_BYTES: Final = 8 * 1024 * 1024
"""Bytes of an object, and thus of an upload in memory."""
MAX_NAME_CHARACTERS: Final = 255
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


class Uploads:
    """Receives the forms of uploads."""

    def __init__(
        self, settings: Settings, database: Database, intake: BodyBytes, large_work: LargeWork
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
        form = FileForm(boundary_of(request), known=_FIELDS)
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
        form: FileForm,
        checker: LineChecker,
        bound: Bound,
        admit: Callable[[Mapping[str, str]], None],
    ) -> list[tuple[str, int]]:
        """Store the file of a form in objects; return their keys and sizes."""
        parts: list[tuple[str, int]] = []
        held, is_admitted = bytearray(), False
        beside = self._large_work.of(file.tenant_id, size=INLINE_SIZE + 1)

        async def put(content: bytes) -> None:
            await beside(lambda: checker.feed(content))
            parts.append((await self._files.put(file.id, content), len(content)))

        async for found in file_pieces(
            request,
            form,
            most_bytes=bound.most,
            too_large=bound.message,
            seconds=self._settings.body_timeout.total_seconds(),
        ):
            if not is_admitted:
                admit(form.fields)
                is_admitted = True
            held += found
            if len(held) >= PART_BYTES:
                await put(bytes(held))
                held.clear()
        if form.name is not None and not is_admitted:
            admit(form.fields)  # The file is empty.
        if held:
            await put(bytes(held))
        return parts


def _check_fields(form: FileForm) -> None:
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


def _bad_line(number: int, reason: str) -> InvalidParameterError:
    return InvalidParameterError(f"Line {number} of the file {reason}.", param=_FILE)

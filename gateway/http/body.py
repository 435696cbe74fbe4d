"""Read a request body within limits of size, structure and time."""

import asyncio
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Self

from fastapi import Request
from starlette.requests import ClientDisconnect

from gateway.dialects.wire import MAX_MEMBERS, StructureMeter
from gateway.http.allowances import BodyBytes, UnpaidRequests
from gateway.http.connection import connection_of
from gateway.http.content_coding import CODINGS, content_coding, decode
from gateway.http.exchange import exchange_of
from gateway.http.form import FileForm, boundary_of, file_pieces
from gateway.models.catalogue import Catalogue
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.concurrency.large_work import INLINE_SIZE, LargeWork
from gateway.platform.settings import Settings
from gateway.records.errors import (
    PayloadTooLargeError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
    shown,
)

_CHARSET: Final = re.compile(r""";\s*charset\s*=\s*"?([^";\s]*)""", re.IGNORECASE)
_UTF8: Final = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})


BYTES_OF_TOKEN: Final = 168
"""Bytes of a body for each token of the window: JSON, images and what a template leaves out."""
MOST_FIELD_BYTES: Final = 16_384
"""Bytes of a field of a form, beside its file."""
MOST_BYTES: Final = 32 * 1024 * 1024
ITEMS_OF_TOKEN: Final = 8
MEMBERS_OF_TOKEN: Final = 4
"""An agent's message of a few tokens has seven arrays, objects and members."""
MOST_WINDOW: Final = 200_000
"""Items and members do not grow beyond this window."""


class BodyLimits(NamedTuple):
    """The size of a body for completions."""

    most_bytes: int
    most_items: int
    most_members: int

    @classmethod
    def of(cls, settings: Settings, *, window: int) -> Self:
        """Return the limits for models whose largest context window has so many tokens.

        What an operator has set does not grow with the window.
        """
        given, tokens = settings.model_fields_set, min(window, MOST_WINDOW)
        by_window = min(window * BYTES_OF_TOKEN, MOST_BYTES)
        has_bytes, has_items = "max_body_bytes" in given, "max_body_items" in given
        return cls(
            max(settings.max_body_bytes, 0 if has_bytes else by_window),
            max(settings.max_body_items, 0 if has_items else tokens * ITEMS_OF_TOKEN),
            max(MAX_MEMBERS, 0 if has_items else tokens * MEMBERS_OF_TOKEN),
        )


@dataclass(eq=False)
class BodyReader:
    """Reads bodies in JSON."""

    _settings: Settings
    _catalogue: Catalogue
    _intake: BodyBytes
    _large_work: LargeWork
    _loop_turns: LoopTurns
    _unpaid: UnpaidRequests

    @property
    def limits(self) -> BodyLimits:
        """The limits for the models that are served now."""
        return BodyLimits.of(self._settings, window=self._catalogue.largest_window)

    async def read(
        self, request: Request, *, sender: str, max_bytes: int | None = None
    ) -> bytes | bytearray:
        """Return the body, of at most `max_bytes`; by default, of the most for completions.

        `sender` identifies the source of the bytes: a tenant's id, or an address before
        authentication.
        Raises PayloadTooLargeError, RequestTimeoutError, TenantQueueFullError,
        UnsupportedMediaTypeError.
        """
        settings, exchange = self._settings, exchange_of(request.scope)
        limits = self.limits
        most = limits.most_bytes if max_bytes is None else max_bytes
        media_type = request.headers.get("content-type", "application/json")
        if media_type != "application/json":
            require_utf8(media_type)
            if not _is_json(media_type):
                raise UnsupportedMediaTypeError(
                    f"'Content-Type' must be application/json. Given: {shown(media_type)}."
                )
        coding = content_coding(request.headers, CODINGS)
        connection = None if coding else connection_of(request.scope)
        if connection is not None:
            whole = connection.take_body(most_bytes=min(most, INLINE_SIZE))
            if whole is not None:
                # Small, complete and thus within all limits.
                exchange.body_bytes = len(whole)
                return whole
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > most:
            raise _too_large(most)
        meter = StructureMeter(most_items=limits.most_items, most_members=limits.most_members)
        body: bytes | bytearray = meter.text
        try:
            async with asyncio.timeout(settings.body_timeout.total_seconds()) as deadline:
                if coding:
                    part = await self._read_encoded(request, sender, coding, most)
                    has_more = False
                else:
                    part, has_more = await _receive(request)
                if has_more or len(part) > min(most, INLINE_SIZE):
                    await self._read(
                        request, part, sender, most, meter, deadline, has_more=has_more
                    )
                else:
                    # Small, complete and thus within all limits.
                    body = part
        except TimeoutError:
            seconds = settings.body_timeout.total_seconds()
            raise RequestTimeoutError(
                f"The body did not arrive within {seconds:g} seconds."
            ) from None
        finally:
            exchange.body_bytes = len(body)
        return body

    async def read_counted(self, request: Request, tenant_id: str) -> bytes | bytearray:
        """Read the body of a request after `UnpaidRequests.admit`, and count it if it is unpaid.

        Raises the errors of `read`.
        """
        exchange = exchange_of(request.scope)
        try:
            content = await self.read(request, sender=tenant_id)
        except ClientDisconnect:
            self._unpaid.count(exchange)
            raise
        if not exchange.is_paid:
            self._unpaid.count(exchange)
        return content

    async def read_form(self, request: Request, tenant_id: str) -> dict[str, Any]:
        """Read a form with an audio file, after `UnpaidRequests.admit`; return its fields.

        Fields are texts, the file bytes, and `stream` is a boolean. Raises an ApiError.
        """
        settings, exchange = self._settings, exchange_of(request.scope)
        form = FileForm(boundary_of(request), known=(), most_field_bytes=MOST_FIELD_BYTES)
        content, most = bytearray(), settings.max_audio_bytes
        try:
            with self._intake.body_of(tenant_id) as add:
                async for piece in file_pieces(
                    request,
                    form,
                    most_bytes=most,
                    too_large=f"'file' must have at most {most} bytes.",
                    seconds=settings.body_timeout.total_seconds(),
                ):
                    add(len(piece))
                    content += piece
        except ClientDisconnect:
            self._unpaid.count(exchange)
            raise
        finally:
            exchange.body_bytes = len(content)
        body: dict[str, Any] = {**form.fields, **form.lists}
        if form.name is not None:
            body["file"] = bytes(content)
        if isinstance(stream := body.get("stream"), str):
            body["stream"] = {"true": True, "false": False}.get(stream.lower(), stream)
        return body

    async def _read_encoded(self, request: Request, sender: str, coding: str, most: int) -> bytes:
        """Read a whole body and decode it in a thread, as few decoders as threads at a time."""
        content, has_more = bytearray(), True
        with self._intake.body_of(sender) as add:
            while has_more:
                part, has_more = await _receive(request)
                if len(content) + len(part) > most:
                    raise _too_large(most)
                add(len(part))
                content += part
            beside = self._large_work.of(sender, size=INLINE_SIZE + 1)
            return await beside(partial(decode, bytes(content), coding, most_bytes=most))

    async def _read(
        self,
        request: Request,
        part: bytes,
        sender: str,
        most: int,
        meter: StructureMeter,
        deadline: asyncio.Timeout,
        *,
        has_more: bool,
    ) -> None:
        """Read the rest of a body after its first part."""
        with self._intake.body_of(sender) as add:
            while True:
                if len(meter.text) + len(part) > most:
                    raise _too_large(most)
                add(len(part))
                if len(meter.text) + len(part) <= INLINE_SIZE:
                    meter.feed(part)
                else:
                    with _paused(deadline):
                        # Parse the parts of concurrent large bodies one at a time.
                        async with self._loop_turns.slice_of(sender):
                            meter.feed(part)
                        while meter.is_in_doubt:
                            async with self._loop_turns.slice_of(sender):
                                meter.count()
                if not has_more:
                    return
                part, has_more = await _receive(request)


def _is_json(media_type: str) -> bool:
    name = media_type.partition(";")[0].strip().lower()
    return name == "application/json" or name.endswith("+json")


def require_utf8(media_type: str) -> None:
    """Raise UnsupportedMediaTypeError for a media type with another charset than UTF-8."""
    charset = _CHARSET.search(media_type)
    if charset is not None and charset[1].lower() not in _UTF8:
        raise UnsupportedMediaTypeError(
            f"The charset in 'Content-Type' must be utf-8. Given: {shown(charset[1])}."
        )


async def _receive(request: Request) -> tuple[bytes, bool]:
    """Return the next part of the body, and whether more follow. Raises ClientDisconnect."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


@contextmanager
def _paused(deadline: asyncio.Timeout) -> Iterator[None]:
    """Stop the clock while bytes that have arrived wait for their turn."""
    if deadline.expired():
        yield  # The next wait ends.
        return
    now, at = asyncio.get_running_loop().time, deadline.when()
    left = math.inf if at is None else at - now()
    deadline.reschedule(None)
    yield
    deadline.reschedule(now() + left)


def _too_large(most: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The body must have at most {most} bytes.")

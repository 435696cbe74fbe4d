"""Pages that are the same for everyone: made once, and not sent again to those who have them."""

import asyncio
import hashlib
from collections.abc import Callable

from fastapi import Request, Response

from gateway.concurrency.large_work import INLINE_SIZE
from gateway.http.context import context_of


class FixedPage:
    """A page that is made in a thread when it is first requested."""

    def __init__(self, make: Callable[[], bytes], *, media_type: str) -> None:
        self._make = make
        self._media_type = media_type
        self._content = b""
        self._tag = ""
        self._lock = asyncio.Lock()

    async def respond(self, request: Request) -> Response:
        """Return the page, or 304 if the request has its tag."""
        if not self._content:
            async with self._lock:
                if not self._content:
                    beside = context_of(request).large_work.of("", size=INLINE_SIZE + 1)
                    self._content = await beside(self._make)
                    self._tag = f'"{hashlib.sha256(self._content).hexdigest()[:32]}"'
        headers = {"etag": self._tag, "cache-control": "no-cache"}
        if self._tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self._content, media_type=self._media_type, headers=headers)

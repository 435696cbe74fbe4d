"""Reading a request body within bounds of size and time."""

import asyncio

from fastapi import Request

from gateway.errors import PayloadTooLargeError, RequestTimeoutError, UnsupportedMediaTypeError
from gateway.settings import Settings


async def read_json_body(
    request: Request, settings: Settings, *, max_bytes: int | None = None
) -> bytes:
    """Return the body, of at most `max_bytes` (by default what the settings allow a completion).

    Raises PayloadTooLargeError, RequestTimeoutError, UnsupportedMediaTypeError.
    """
    most = settings.max_body_bytes if max_bytes is None else max_bytes
    media_type = request.headers.get("content-type", "application/json").split(";")[0].strip()
    if media_type.lower() != "application/json" and not media_type.lower().endswith("+json"):
        raise UnsupportedMediaTypeError("The body must be sent as content-type application/json.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise _too_large(most)
    try:
        async with asyncio.timeout(settings.body_timeout.total_seconds()):
            return await _read(request, most)
    except TimeoutError:
        seconds = settings.body_timeout.total_seconds()
        raise RequestTimeoutError(f"The body did not arrive within {seconds:g} seconds.") from None


async def _read(request: Request, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


def _too_large(most: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The body must have at most {most} bytes.")

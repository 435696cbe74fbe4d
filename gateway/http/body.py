"""Read a request body within limits of size, structure and time."""

import asyncio

from fastapi import Request

from gateway.concurrency.large_work import INLINE_SIZE
from gateway.dialects.wire import StructureMeter
from gateway.errors import PayloadTooLargeError, RequestTimeoutError, UnsupportedMediaTypeError
from gateway.http.context import ProcessContext


async def read_json_body(
    request: Request, context: ProcessContext, *, sender: str, max_bytes: int | None = None
) -> bytearray:
    """Return the body, of at most `max_bytes`; the settings give the default limit for completions.

    `sender` identifies the source of the bytes: a tenant's id, or an address before authentication.
    Raises PayloadTooLargeError, RequestTimeoutError, TenantQueueFullError,
    UnsupportedMediaTypeError.
    """
    settings = context.settings
    most = settings.max_body_bytes if max_bytes is None else max_bytes
    media_type = request.headers.get("content-type", "application/json").split(";")[0].strip()
    if media_type.lower() != "application/json" and not media_type.lower().endswith("+json"):
        raise UnsupportedMediaTypeError("'Content-Type' must be application/json.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise _too_large(most)
    meter = StructureMeter(most_items=settings.max_body_items)
    try:
        async with asyncio.timeout(settings.body_timeout.total_seconds()):
            await _read(request, context, sender, most, meter)
    except TimeoutError:
        seconds = settings.body_timeout.total_seconds()
        raise RequestTimeoutError(f"The body did not arrive within {seconds:g} seconds.") from None
    finally:
        request.state.body_bytes = len(meter.text)
    return meter.text


async def _read(
    request: Request, context: ProcessContext, sender: str, most: int, meter: StructureMeter
) -> None:
    with context.intake.body_of(sender) as add:
        async for part in request.stream():
            if len(meter.text) + len(part) > most:
                raise _too_large(most)
            add(len(part))
            if len(meter.text) + len(part) <= INLINE_SIZE:
                meter.feed(part)
                continue
            # Parse the parts of concurrent large bodies one at a time.
            async with context.loop_turns.slice_of(sender):
                meter.feed(part)
            while meter.is_in_doubt:
                async with context.loop_turns.slice_of(sender):
                    meter.count()


def _too_large(most: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The body must have at most {most} bytes.")

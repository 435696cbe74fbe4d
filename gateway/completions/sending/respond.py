"""Send a response to a client, whole or as a stream."""

import asyncio
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from gateway.completions.rendering.assembler import WholeResponse
from gateway.completions.rendering.form_registry import collect
from gateway.completions.sending.measuring import RequestMeasure
from gateway.completions.sending.streaming import DisconnectWatch, StreamedCompletion
from gateway.completions.sending.subscription import Subscription
from gateway.http.connection import connection_of
from gateway.limits.headers import dollars
from gateway.platform.settings import Settings
from gateway.records.errors import GenerationTimeoutError


@dataclass(frozen=True, slots=True)
class Recipient:
    """A client, and how it receives a response."""

    request: Request
    measure: RequestMeasure
    _: KW_ONLY
    is_streamed: bool
    skip: int = 0
    """Number of events that the stream omits, because the client has them."""
    has_ids: bool = True
    """Whether the stream's events have ids."""


class ResponseSender:
    """Sends responses to connected clients."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def send(
        self, subscription: Subscription, recipient: Recipient, headers: Mapping[str, str]
    ) -> Response:
        """Return a response to send: a whole one, or a stream that has its first event.

        Raises ClientDisconnect if the client leaves before, or an ApiError if the request fails
        before.
        """
        connection = connection_of(recipient.request.scope)
        watch = DisconnectWatch(recipient.request.receive, subscription.generation, connection)
        send = self._send_streamed if recipient.is_streamed else self._send_whole
        return await send(subscription, recipient, headers, watch)

    async def _send_whole(
        self,
        subscription: Subscription,
        recipient: Recipient,
        headers: Mapping[str, str],
        watch: DisconnectWatch,
    ) -> Response:
        try:
            content = await _collect(
                subscription, watch, seconds=self._settings.request_timeout.total_seconds()
            )
            await subscription.finish(content.content)
            return _response(subscription, content, {**_times(recipient.measure), **headers})
        except ClientDisconnect:
            subscription.leave()
            raise
        except BaseException as error:
            subscription.fail(error)
            raise
        finally:
            watch.stop()
            await subscription.aclose()

    async def _send_streamed(
        self,
        subscription: Subscription,
        recipient: Recipient,
        headers: Mapping[str, str],
        watch: DisconnectWatch,
    ) -> Response:
        """Wait for the first event, so that an earlier failure gets its own HTTP status.

        If the client already has every event, the response is 204, which stops a browser from
        reconnecting.
        """
        settings, measure = self._settings, recipient.measure
        response = StreamedCompletion(
            subscription,
            skip=recipient.skip,
            has_ids=recipient.has_ids,
            watch=watch,
            measure=measure,
            keep_alive_seconds=settings.keep_alive_interval.total_seconds(),
            headers={**_times(measure), **headers},
        )
        try:
            await response.begin(timeout_seconds=settings.commit_after.total_seconds())
        except BaseException as error:
            subscription.fail(error)
            await response.abandon()
            raise
        if response.is_over:
            await response.abandon()
            return Response(status_code=204)
        measure.is_streaming = True
        return response


async def _collect(
    subscription: Subscription, watch: DisconnectWatch, *, seconds: float
) -> WholeResponse:
    """Wait for the whole response. Raises ClientDisconnect, or an ApiError if it fails."""
    is_late = False

    def expire() -> None:
        nonlocal is_late
        is_late = True
        subscription.generation.wake()

    def check() -> None:
        if watch.disconnected:
            raise ClientDisconnect
        if is_late:
            raise GenerationTimeoutError("The request exceeded its time limit.")

    timer = asyncio.get_running_loop().call_later(seconds, expire)
    try:
        return await collect(subscription.completion, subscription.generation, check=check)
    finally:
        timer.cancel()


def _response(
    subscription: Subscription, content: WholeResponse, headers: Mapping[str, str]
) -> Response:
    cost = {}
    if subscription.completion.cost_of is not None:
        cost["x-cost"] = dollars(subscription.completion.cost_of(content.usage))
    return Response(
        content.content,
        media_type="application/json",
        headers={**headers, **cost, **content.headers},
    )


def _times(measure: RequestMeasure) -> dict[str, str]:
    return {"openai-processing-ms": str(measure.elapsed_ms())}

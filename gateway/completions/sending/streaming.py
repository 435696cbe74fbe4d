"""Stream a completion as server-sent events while it is generated.

The task of a stream sends the first event, the end and everything rare with ASGI's `send`. While it
waits for replies, the reply reader renders plain deltas and writes them to the connection, without
a wake-up of the task (docs/decisions/0035-write-from-the-reply-reader.md).
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from contract.messages import Delta
from gateway.completions.queue.generation import REPLIES_AT_ONCE, Generation, Take, in_slices
from gateway.completions.queue.output import JobOutput
from gateway.completions.rendering.events import EventRenderer
from gateway.completions.rendering.form_registry import event_renderer
from gateway.completions.rendering.sse import BEGINNING, KEEP_ALIVE
from gateway.completions.sending.measuring import RequestMeasure
from gateway.completions.sending.subscription import Subscription
from gateway.completions.stored.journal import encode_message
from gateway.http.connection import DirectConnection, connection_of
from gateway.records.errors import ApiError, SlowReaderError

_HEADERS: Final = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)


OPENING_SECONDS: Final = 0.5
"""How long a stream that opens without a reply waits for a failure, which has its own status."""
_TICKS: Final = 4
"""A keep-alive is due in the last of these parts of its interval, however late the last event."""


class KeepAlive:
    """Wakes a stream in each interval without an event."""

    def __init__(self, generation: Generation, renderer: EventRenderer, seconds: float) -> None:
        self.has_begun = False
        """Whether a keep-alive has sent the beginning of the next event."""
        self._is_due = False
        self._generation = generation
        self._renderer = renderer
        self._number = renderer.number
        self._seconds = seconds / _TICKS
        self._quiet = 1
        """Ticks since the last event or keep-alive."""
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._tick)

    def _tick(self) -> None:
        number = self._renderer.number
        self._quiet = self._quiet + 1 if number == self._number else 1
        self._number = number
        if self._quiet == _TICKS:
            self._is_due, self._quiet = True, 1
            self._generation.wake()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._tick)

    def after(self, events: bytes) -> bytes:
        """Return what to send after a wake-up: its events, or else a keep-alive that is due."""
        is_due, self._is_due = self._is_due, False
        if events and self.has_begun:
            events, self.has_begun = events.removeprefix(BEGINNING), False
        elif is_due and not events and (event := self._renderer.keep_alive()) is not None:
            events = event
        elif is_due and not events:
            events, self.has_begun = KEEP_ALIVE if self.has_begun else BEGINNING, True
        return events

    def stop(self) -> None:
        """Send no more keep-alives."""
        self._timer.cancel()


@dataclass(eq=False, slots=True)
class PlainDelivery:
    """Delivers plain deltas from the reply reader to the client's connection, in one pass.

    This is the hot path of the gateway: it runs once for every token. It does everything that
    `Replies`, `JobOutput`, `Generation`, `OwnedResponse` and `StreamedCompletion` would do one
    after another, while the task of the stream waits for replies.
    """

    _generation: Generation
    _renderer: EventRenderer
    _connection: DirectConnection

    def take(self, prompt_index: int, output: JobOutput, delta: Delta, now: float) -> bool:
        """Apply, record, render and write a delta (`gateway.completions.queue.generation.Take`)."""
        connection, generation = self._connection, self._generation
        if (
            delta.finish_reason is not None
            or connection.is_paused
            or not 0 <= delta.choice < len(output.choices)
        ):
            return False
        choice = output.choices[delta.choice]
        received = choice.token_ids
        last_at = choice.last_tokens_at
        if not (delta.token_ids and last_at) or delta.start != len(received):
            return False
        try:
            received.fromlist(delta.token_ids)
        except OverflowError:
            return False
        event = self._renderer.render_plain(prompt_index, delta)
        if event is None:
            del received[delta.start :]
            return False
        tokens = len(delta.token_ids)
        choice.last_tokens_at = now
        output.latency.observe((now - last_at) / tokens)
        generation.received_tokens[prompt_index] += tokens
        if generation.journal is not None:
            generation.journal.append(encode_message(prompt_index, delta))
        if event:
            connection.write(event)
        return True


class DisconnectWatch:
    """Detects that the client has disconnected, in any phase of its request, and wakes its task."""

    def __init__(
        self, receive: Receive, generation: Generation, connection: DirectConnection | None = None
    ) -> None:
        """Watch the client's connection, or receive its messages if there is none."""
        self.disconnected = False
        self._receive = receive
        self._generation = generation
        self._connection = connection
        self._task: asyncio.Task[None] | None = None
        if connection is None:
            self._task = asyncio.create_task(self._run())
        else:
            connection.watch(self._lost)

    def stop(self) -> None:
        """Stop watching."""
        if self._connection is not None:
            self._connection.watch(None)
        if self._task is not None:
            self._task.cancel()

    def _lost(self) -> None:
        self.disconnected = True
        self._generation.wake()

    async def _run(self) -> None:
        # A task that ends as cancelled keeps its frames, which refer to the task.
        with suppress(asyncio.CancelledError):
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self._lost()


class StreamedCompletion(Response):
    """The events of a response, except the first `skip`, which the client already has."""

    status_code = 200
    background = None

    def __init__(
        self,
        subscription: Subscription,
        *,
        skip: int = 0,
        has_ids: bool,
        watch: DisconnectWatch,
        measure: RequestMeasure,
        keep_alive_seconds: float,
        headers: Mapping[str, str],
    ) -> None:
        # Starlette's own __init__ would add the length of a body. The server sends a stream in
        # chunks.
        self.raw_headers = [
            *((name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()),
            *_HEADERS,
        ]
        self._subscription = subscription
        self._generation = subscription.generation
        self._skip = skip
        self._watch = watch
        self._measure = measure
        self._keep_alive_seconds = keep_alive_seconds
        self._renderer = event_renderer(subscription.completion, skip=skip, has_ids=has_ids)
        self._events = b""
        self._committed = False
        self._last_events: bytes | None = None
        """The last events of a resumed stream that failed before it started."""

    @property
    def is_over(self) -> bool:
        """Whether `begin` has found that the client already has every event."""
        return (self._renderer.finished and not self._events) or self._last_events == b""

    async def begin(self, *, timeout_seconds: float) -> None:
        """Wait for the first event, at most `timeout_seconds`.

        Raises an ApiError if the request fails before its first event, so that the response has the
        status of the error. A client that already has events always receives a failure as an event.
        """
        if self._renderer.OPENS_AT_ONCE:
            timeout_seconds = min(timeout_seconds, OPENING_SECONDS)
        timer = asyncio.get_running_loop().call_later(timeout_seconds, self._commit)
        try:
            while not (
                self._events
                or self._renderer.finished
                or self._failure()
                or self._watch.disconnected
                or self._committed
            ):
                self._events = await self._next_events()
        finally:
            timer.cancel()
        if (failure := self._failure()) and not self._events:
            if not self._skip:
                raise failure
            self._last_events = self._renderer.render_failure(failure)

    async def abandon(self) -> None:
        """Stop reading; send no response if nothing was sent."""
        self._watch.stop()
        await self._subscription.aclose()

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI). The watch receives the client's messages."""
        del receive
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        try:
            await send(start)
            await self._send_events(send, connection_of(scope))
        except BaseException as error:
            self._subscription.fail(error)
            raise
        finally:
            # First, because waiting may be cancelled.
            self._measure.close()
            await self.abandon()

    async def _send_events(self, send: Send, connection: DirectConnection | None) -> None:
        renderer, watch = self._renderer, self._watch
        alive = KeepAlive(self._generation, renderer, self._keep_alive_seconds)
        take = self._take_with(connection)
        events = self._events or renderer.opening()
        try:
            while not watch.disconnected:
                failure = self._failure()
                if failure is not None:
                    self._subscription.fail(failure)
                    self._measure.failed(failure)
                    last = self._last_events
                    if last is None:
                        last = renderer.render_failure(failure)
                    await _send(send, events + alive.after(last), more=False)
                    return
                if renderer.finished:
                    await self._subscription.finish(renderer.whole)
                    await _send(send, events, more=False)
                    return
                if events:
                    await _send(send, events, more=True)
                # The task measures the first token, and continues an event.
                is_plain = not (alive.has_begun or self._measure.waits_for_token)
                events = alive.after(await self._next_events(take if is_plain else None))
            self._leave()
        finally:
            alive.stop()

    def _take_with(self, connection: DirectConnection | None) -> Take | None:
        """Return a function that delivers a plain delta at once.

        Returns None if the server has no `DirectConnection`, or if the request has so many choices
        that its deltas are rendered in turns.
        """
        if connection is None or self._subscription.completion.choices >= REPLIES_AT_ONCE:
            return None
        return PlainDelivery(self._generation, self._renderer, connection).take

    def _leave(self) -> None:
        failure = self._failure()
        if isinstance(failure, SlowReaderError):
            # The client stopped reading: its connection was closed before the error could be sent.
            self._subscription.fail(failure)
            self._measure.failed(failure)
        else:
            self._subscription.leave()
            self._measure.disconnected()

    def _commit(self) -> None:
        self._committed = True
        self._generation.wake()

    async def _next_events(self, take: Take | None = None) -> bytes:
        replies = await self._generation.replies(take)
        if replies:
            self._subscription.replied()
            self._measure.replied(replies)
        request = self._subscription.completion.request
        if len(replies) < REPLIES_AT_ONCE and request.scored_alternatives is None:
            return self._renderer.render(replies)
        parts = []
        for some in in_slices(replies):
            await self._renderer.prompt_logprobs.prepare(some, self._generation.turn)
            async with self._generation.turn_for(some):
                parts.append(self._renderer.render(some))
            if self._renderer.failure is not None:
                break
        return b"".join(parts)

    def _failure(self) -> ApiError | None:
        if self._generation.overflowed:
            return SlowReaderError("The client reads too slowly; the request was cancelled.")
        return self._renderer.failure


async def _send(send: Send, body: bytes, *, more: bool) -> None:
    message: dict[str, Any] = {"type": "http.response.body", "body": body, "more_body": more}
    await send(message)

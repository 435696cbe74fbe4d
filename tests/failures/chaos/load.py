"""Clients of all behaviours, which check each response against the expected one."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from tests.failures.chaos.client import DONE, Event, Reply, talk
from tests.failures.chaos.history import Behaviour, Ending, History, Stretch
from tests.failures.chaos.recipes import Recipe
from tests.failures.chaos.transcript import Transcript
from tests.support.stack import MODEL

PATIENCE_SECONDS: Final = 90.0
"""Time limit in which every request must end for its client, whatever faults occur."""
PAUSE_SECONDS: Final = 0.3
"""Before a client retries."""
MOST_PAUSE_SECONDS: Final = 3.0
"""Cap on `Retry-After`, so that a run need not take long."""
COME_AGAIN: Final = frozenset({409, 429, 503, 529})
"""Statuses after which the same request may succeed; 529 is 503 in Anthropic's API."""
DENIALS: Final = frozenset({400, 413})
"""Statuses of a final rejection of a hostile request."""
START_SECONDS: Final = 90.0
"""Time limit of an undisturbed request to a deployment that has just started."""

BEHAVIOURS: Final[Mapping[Behaviour, int]] = {
    Behaviour.STREAM: 15,
    Behaviour.RETURNING: 30,
    Behaviour.WHOLE: 10,
    Behaviour.REPEATING: 15,
    Behaviour.REPEATING_STREAM: 8,
    Behaviour.BACKGROUND: 10,
    Behaviour.LEAVING: 8,
    Behaviour.CANCELLING: 4,
    Behaviour.HOSTILE: 5,
}
_STREAMED: Final = frozenset(
    {Behaviour.STREAM, Behaviour.RETURNING, Behaviour.REPEATING_STREAM, Behaviour.LEAVING}
)
_SINGLE: Final = frozenset(
    {Behaviour.STREAM, Behaviour.WHOLE, Behaviour.LEAVING, Behaviour.HOSTILE}
)
"""Behaviours that do not retry."""
_KEYED: Final = frozenset(
    {
        Behaviour.REPEATING,
        Behaviour.REPEATING_STREAM,
        Behaviour.BACKGROUND,
        Behaviour.CANCELLING,
    }
)
"""Behaviours with an Idempotency-Key: their clients learn the id of each request that is paid."""
_WAITING: Final = frozenset({Behaviour.BACKGROUND, Behaviour.CANCELLING})
KEYED_TENANT: Final = "prepaid"
"""All of its requests have an Idempotency-Key."""
AGAIN: Final = 0.3
"""Share of the repeating clients that repeat a request whose response they have."""


@dataclass(slots=True)
class Load:
    """A fixed number of clients, each with one request at a time."""

    gateways: Mapping[str, str]
    """Base URLs by name."""
    keys: Mapping[str, str]
    """API keys by tenant."""
    recipes: Sequence[Recipe]
    rng: random.Random
    behaviours: Mapping[Behaviour, int] = field(default_factory=lambda: BEHAVIOURS)
    patience: float = PATIENCE_SECONDS
    histories: list[History] = field(default_factory=list)
    is_over: bool = False
    _clients: set["asyncio.Task[None]"] = field(default_factory=set)
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    @property
    def _tenants(self) -> list[str]:
        has_keyed = not _KEYED.isdisjoint(self.behaviours)
        return [each for each in sorted(self.keys) if has_keyed or each != KEYED_TENANT]

    async def run(self, clients: int) -> None:
        """Let clients send requests until the end time, and finish those that have begun."""
        async with self._tasks:
            for _ in range(clients):
                self._begin(self._client())

    def burst(self, requests: int) -> None:
        """Send further requests of one tenant at once, of clients that come only once."""
        tenant = self.rng.choice(self._tenants)
        for _ in range(requests):
            self._begin(self._next(tenant)[1].run())

    def _begin(self, client: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(client)
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    def leave(self) -> None:
        """Disconnect all clients that are reading streams."""
        for client in self._clients:
            client.cancel()

    async def _client(self) -> None:
        while not self.is_over:
            history, visit = self._next()
            try:
                await visit.run()
            except asyncio.CancelledError:
                history.end(Ending.LEFT)
                raise
            if history.ending in (Ending.REFUSED, Ending.UNREACHED):
                await asyncio.sleep(1)

    def _next(self, tenant: str = "") -> tuple[History, "ClientRequest"]:
        rng = self.rng
        tenant = tenant or rng.choice(self._tenants)
        weights = self.behaviours
        if tenant == KEYED_TENANT:
            weights = {each: weight for each, weight in weights.items() if each in _KEYED}
        (behaviour,) = rng.choices(list(weights), list(weights.values()))
        recipe = rng.choice(
            [
                each
                for each in self.recipes
                if (each.may_stream or behaviour not in _STREAMED)
                and (each.may_wait or behaviour not in _WAITING)
            ]
        )
        history = History(len(self.histories), recipe.name, behaviour, tenant)
        self.histories.append(history)
        return history, ClientRequest(
            history,
            recipe,
            self.gateways,
            self.keys[tenant],
            start=rng.randrange(len(self.gateways)),
            draw=rng.random(),
            patience=self.patience,
        )


@cache
def _hostile_requests() -> Sequence[tuple[str, dict[str, Any]]]:
    """Return paths and bodies that are expensive for the gateway, rejected or not."""
    words = "word " * 100_000
    completions: list[dict[str, Any]] = [
        {"prompt": [[] for _ in range(500_000)]},
        {"prompt": "a", "unknown": dict.fromkeys(map(str, range(100_000)))},
        {"prompt": ["a", 5] * 60_000},
        {"prompt": words},
        {"prompt": "a", "n": 127, "best_of": 128, "logprobs": 5},
        {"prompt": "a", "structured_outputs": {"regex": "(a{1,90}|b){1,90}"}},
    ]
    chat = {"messages": [{"role": "user", "content": words}]}
    return [*(("/v1/completions", body) for body in completions), ("/v1/chat/completions", chat)]


class ClientRequest:
    """A client with one request."""

    def __init__(
        self,
        history: History,
        recipe: Recipe,
        gateways: Mapping[str, str],
        key: str,
        *,
        start: int,
        draw: float,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._history = history
        self._recipe = recipe
        self._gateways = list(gateways.items())
        self._key = key
        self._turn = start
        self._draw = draw
        self._deadline = history.began + patience
        self._idempotency_key = str(uuid.UUID(int=int(draw * 2**64) << 64 | history.number))
        self._told_before = 0
        """Number of the last event that a replay from the beginning repeats."""
        self._final_error: dict[str, Any] | None = None
        """The error that ended a stream whose response is still being generated."""

    async def run(self) -> None:
        """Send the request as this behaviour does, until it ends."""
        acts: dict[Behaviour, Callable[[], Any]] = {
            Behaviour.STREAM: self._stream,
            Behaviour.RETURNING: self._stream,
            Behaviour.LEAVING: self._stream,
            Behaviour.REPEATING_STREAM: self._stream,
            Behaviour.WHOLE: self._whole,
            Behaviour.REPEATING: self._whole,
            Behaviour.BACKGROUND: self._background,
            Behaviour.CANCELLING: self._background,
            Behaviour.HOSTILE: self._hostile,
        }
        await acts[self._history.behaviour]()
        self._check()

    @property
    def _may_retry(self) -> bool:
        return self._history.behaviour not in _SINGLE

    def _check(self) -> None:
        history, is_streamed = self._history, self._history.behaviour in _STREAMED
        if history.ending is Ending.UNFINISHED:
            history.end(Ending.HUNG)
        if history.behaviour is Behaviour.HOSTILE:
            return
        expected = self._recipe.expected[is_streamed]
        if difference := history.transcript.difference(expected):
            history.add_error(difference)

    async def _stream(self) -> None:
        history = self._history
        body = self._recipe.body_of(stream=True)
        headers = {"x-event-ids": "true"}
        if history.behaviour is Behaviour.REPEATING_STREAM:
            headers["idempotency-key"] = self._idempotency_key
        while history.ending is Ending.UNFINISHED and self._has_time():
            if history.behaviour is not Behaviour.REPEATING_STREAM and history.last_number:
                headers["last-event-id"] = f"{history.request_id}:{history.last_number}"
            self._told_before = history.last_number if "idempotency-key" in headers else 0
            self._final_error = None
            reply = await self._talk(self._recipe.path, body, headers, self._on_event)
            await self._after(reply, is_over=history.transcript.is_done)

    async def _whole(self) -> None:
        history = self._history
        body = self._recipe.body_of(stream=False)
        headers = {}
        if history.behaviour is Behaviour.REPEATING:
            headers["idempotency-key"] = self._idempotency_key
        while history.ending is Ending.UNFINISHED and self._has_time():
            reply = await self._talk(self._recipe.path, body, headers)
            if reply.is_complete and reply.status == 200:
                self._read_whole(reply)
            await self._after(reply, is_over=history.transcript.is_done)
        if history.behaviour is Behaviour.REPEATING and self._draw < AGAIN:
            await self._repeat(body, headers)

    async def _repeat(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """Request the response again that this client has, at the next gateway."""
        history, again = self._history, Transcript()
        reply = await self._talk(self._recipe.path, body, headers)
        if history.ending is not Ending.COMPLETE or not reply.is_complete or reply.status != 200:
            return
        history.identify(reply.json)
        again.add(reply.json)
        again.is_done = True
        if difference := again.difference(history.transcript):
            history.add_error(f"repeated: {difference}")

    def _read_whole(self, reply: Reply) -> None:
        body = reply.json
        self._history.identify(body)
        self._history.transcript.add(body)
        self._history.transcript.is_done = True

    async def _hostile(self) -> None:
        """Send a request that is expensive to reject. It is rejected, or served and billed."""
        requests = _hostile_requests()
        path, body = requests[int(self._draw * len(requests))]
        reply = await self._talk(path, {"model": MODEL, "max_tokens": 20} | body, {})
        if reply.is_complete and reply.status == 200:
            self._read_whole(reply)
        if reply.is_complete and reply.status in DENIALS:
            self._history.end(Ending.DENIED)
        else:
            await self._after(reply, is_over=self._history.transcript.is_done)

    async def _background(self) -> None:
        """Start a background request and poll its end at any gateway."""
        history = self._history
        body = {**self._recipe.body_of(stream=False), "background": True}
        headers = {"idempotency-key": self._idempotency_key}
        while not history.request_id and history.ending is Ending.UNFINISHED and self._has_time():
            reply = await self._talk(self._recipe.path, body, headers)
            if reply.is_complete and reply.status in (200, 202):
                history.identify(reply.json)
            await self._after(reply, is_over=False)
        if history.behaviour is Behaviour.CANCELLING and history.request_id:
            await asyncio.sleep(self._draw * 2)
            await self._cancel()
        while history.ending is Ending.UNFINISHED and history.request_id and self._has_time():
            await asyncio.sleep(PAUSE_SECONDS)
            reply = await self._talk(f"{self._recipe.path}/{history.request_id}", None, {})
            if reply.is_complete and reply.status == 200:
                self._read_state(reply)
            await self._after(reply, is_over=history.transcript.is_done)

    async def _cancel(self) -> None:
        history = self._history
        while self._has_time():
            reply = await self._talk(f"{self._recipe.path}/{history.request_id}/cancel", {}, {})
            if reply.is_complete and reply.status == 200:
                return
            await self._after(reply, is_over=False)
            if history.ending is not Ending.UNFINISHED:
                return

    def _read_state(self, reply: Reply) -> None:
        body = reply.json
        history = self._history
        status = body.get("status", "completed")
        if "choices" in body and status == "completed":
            self._read_whole(reply)
        elif status == "cancelled" and history.behaviour is Behaviour.CANCELLING:
            history.end(Ending.CANCELLED)
        elif status not in ("queued", "in_progress"):
            history.add_error(f"its state is {reply.body[:200]!r}")
            history.end(Ending.FAILED)

    async def _talk(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        on_event: Callable[[Event], bool] | None = None,
    ) -> Reply:
        history = self._history
        if history.stretches:
            history.returns += 1
        # Like a load balancer, try the next gateway if one refuses the connection.
        for _ in self._gateways:
            gateway, url = self._gateways[self._turn % len(self._gateways)]
            self._turn += 1
            began = time.monotonic()
            reply = await talk(
                url,
                self._key,
                path,
                patience=max(self._deadline - began, 0.1),
                body=body,
                headers={"x-include-cost": "true", **headers},
                on_event=on_event,
            )
            if reply.was_reached:
                break
        is_broken = not (reply.is_complete or reply.has_left)
        is_refusal = reply.status == 503 and reply.is_complete
        code = reply.json.get("error", {}).get("code", "") if is_refusal else ""
        history.stretches.append(Stretch(gateway, began, time.monotonic(), is_broken, code))
        history.statuses.append(reply.status)
        kind = "GET" if body is None else "POST"
        state = "complete" if reply.is_complete else "left" if reply.has_left else "broken"
        comes_from = headers.get("last-event-id", "")
        history.note(
            f"{kind} {path} at {gateway} {f'after {comes_from} ' if comes_from else ''}"
            f"-> {reply.status}, {state}, {history.last_number} events, "
            f"{history.transcript.tokens} tokens {self._error_of(reply)}"
        )
        return reply

    def _error_of(self, reply: Reply) -> str:
        if self._final_error is not None:
            return f"final_error: {json.dumps(self._final_error)}"
        if self._history.transcript.error:
            return json.dumps(self._history.transcript.error)
        return reply.body[:300].decode(errors="replace") if reply.status not in (0, 200) else ""

    async def _after(self, reply: Reply, *, is_over: bool) -> None:
        """Decide what the client does after a connection has ended."""
        history = self._history
        if history.transcript.error is not None:
            history.end(Ending.FAILED)
        elif is_over:
            history.end(Ending.COMPLETE)
        elif reply.has_left:
            history.end(Ending.LEFT)
        elif reply.is_late:
            history.end(Ending.HUNG)
        elif self._final_error is not None:
            await self._after_final_error(self._final_error)
        elif reply.status in COME_AGAIN and reply.is_complete and not _is_conflict(reply):
            await self._retry(reply)
        elif not reply.is_complete:
            await self._broken(reply)
        elif reply.status not in (200, 202):
            history.add_error(f"status {reply.status}: {reply.body[:300]!r}")
            history.end(Ending.FAILED)
        elif reply.is_stream:
            history.add_error("a stream ended without [DONE]")
            history.end(Ending.FAILED)

    async def _after_final_error(self, error: dict[str, Any]) -> None:
        if self._may_retry and self._has_begun:
            await asyncio.sleep(PAUSE_SECONDS)
            return
        self._history.final_error = str(error["code"])
        self._history.end(Ending.CUT)

    async def _retry(self, reply: Reply) -> None:
        history = self._history
        if reply.retry_after is None:
            history.add_error(f"status {reply.status} without Retry-After")
        if not (self._may_retry and self._has_begun):
            history.end(Ending.REFUSED)
            return
        await asyncio.sleep(min(reply.retry_after or 1.0, MOST_PAUSE_SECONDS))

    async def _broken(self, reply: Reply) -> None:
        if not (self._may_retry and self._has_begun):
            self._history.end(Ending.CUT if reply.was_reached else Ending.UNREACHED)
            return
        await asyncio.sleep(PAUSE_SECONDS)

    @property
    def _has_begun(self) -> bool:
        """Whether the client can resume: it has an idempotency key or the id of an event."""
        return self._history.behaviour is not Behaviour.RETURNING or self._history.last_number > 0

    def _has_time(self) -> bool:
        return time.monotonic() < self._deadline

    def _on_event(self, event: Event) -> bool:
        """Record an event; return whether the client disconnects now."""
        history = self._history
        number = self._number(event)
        is_new = number > history.last_number
        if event.data == DONE:
            history.last_number = max(number, history.last_number)
            # A stream that ends early repeats the id of the last event.
            history.transcript.is_done = is_new and history.transcript.error is None
            return False
        body = json.loads(event.data)
        if not is_new:
            self._repeated(number, body)
            return False
        if number != history.last_number + 1:
            history.add_error(f"event {number} came after {history.last_number}")
        history.last_number = number
        history.received(event.at)
        history.identify(body)
        history.transcript.add(body)
        return (
            history.behaviour is Behaviour.LEAVING and history.transcript.tokens > self._draw * 60
        )

    def _repeated(self, number: int, body: dict[str, Any]) -> None:
        """Record an event with a repeated number: of a replay, or of a stream's early end."""
        if "error" in body:
            self._final_error = body["error"]
        elif body["choices"] and number > self._told_before:
            self._history.add_error(f"event {number} came twice")

    def _number(self, event: Event) -> int:
        """Return an event's number; without an id, the next one."""
        if not event.id:
            if self._history.behaviour is Behaviour.RETURNING and not self._history.errors:
                self._history.add_error("an event has no id")
            return self._history.last_number + 1
        request_id, _, number = event.id.rpartition(":")
        self._history.identify({"id": request_id})
        return int(number)


def _is_conflict(reply: Reply) -> bool:
    """Whether a 409 is final. Errors of messages have no code."""
    return reply.status == 409 and reply.retry_after is None


async def record_response(url: str, key: str, recipe: Recipe, *, stream: bool) -> None:
    """Send a recipe without any disturbance, and keep the response. Raises AssertionError."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        history = History(0, recipe.name, Behaviour.STREAM if stream else Behaviour.WHOLE, "")
        recipe.expected[stream] = history.transcript
        await ClientRequest(history, recipe, {"gateway": url}, key, start=0, draw=0).run()
        if history.ending is not Ending.REFUSED or time.monotonic() > deadline:
            break
        # A deployment that has just started on a busy machine may respond 503.
        await asyncio.sleep(1)
    assert history.ending is Ending.COMPLETE, history.reported(history.began)
    assert not history.errors, history.reported(history.began)

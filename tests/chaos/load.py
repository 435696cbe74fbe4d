"""Clients of all manners, who know what they must be told."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from tests.chaos.client import DONE, Event, Reply, talk
from tests.chaos.recipes import Recipe
from tests.chaos.story import Ending, Manner, Story, Stretch
from tests.support.stack import MODEL

PATIENCE_SECONDS: Final = 90.0
"""In which every request must have ended for its client, whatever happens meanwhile."""
PAUSE_SECONDS: Final = 0.3
"""Before a client comes back."""
MOST_PAUSE_SECONDS: Final = 3.0
"""However long a refusal says, so that a run need not take long."""
COME_AGAIN: Final = frozenset({409, 429, 503})
"""Statuses that say that the same request may succeed later."""
DENIALS: Final = frozenset({400, 413})
"""Statuses of hostile requests that are rejected for good."""
START_SECONDS: Final = 90.0
"""In which an undisturbed request is answered by a deployment that has only just started."""

MANNERS: Final[Mapping[Manner, int]] = {
    Manner.STREAM: 15,
    Manner.RETURNING: 30,
    Manner.WHOLE: 10,
    Manner.REPEATING: 15,
    Manner.REPEATING_STREAM: 8,
    Manner.BACKGROUND: 10,
    Manner.LEAVING: 8,
    Manner.CANCELLING: 4,
    Manner.HOSTILE: 5,
}
_STREAMED: Final = frozenset(
    {Manner.STREAM, Manner.RETURNING, Manner.REPEATING_STREAM, Manner.LEAVING}
)
_SINGLE: Final = frozenset({Manner.STREAM, Manner.WHOLE, Manner.LEAVING, Manner.HOSTILE})
"""Manners of clients that do not come back."""


@dataclass(slots=True)
class Load:
    """A steady number of clients, each with one request at a time."""

    gateways: Mapping[str, str]
    """Base URLs by name."""
    keys: Mapping[str, str]
    """API keys by tenant."""
    recipes: Sequence[Recipe]
    rng: random.Random
    manners: Mapping[Manner, int] = field(default_factory=lambda: MANNERS)
    patience: float = PATIENCE_SECONDS
    stories: list[Story] = field(default_factory=list)
    is_over: bool = False
    _clients: list["asyncio.Task[None]"] = field(default_factory=list)

    async def run(self, clients: int) -> None:
        """Let clients ask for one thing after the other until it is over, and finish what they began."""
        async with asyncio.TaskGroup() as tasks:
            self._clients = [tasks.create_task(self._client()) for _ in range(clients)]

    def leave(self) -> None:
        """Disconnect all clients in the middle of their streams."""
        for client in self._clients:
            client.cancel()

    async def _client(self) -> None:
        while not self.is_over:
            story, visit = self._next()
            try:
                await visit.run()
            except asyncio.CancelledError:
                story.end(Ending.LEFT)
                raise
            if story.ending in (Ending.REFUSED, Ending.UNREACHED):
                await asyncio.sleep(1)

    def _next(self) -> tuple[Story, "Visit"]:
        rng = self.rng
        (manner,) = rng.choices(list(self.manners), list(self.manners.values()))
        recipe = rng.choice(
            [each for each in self.recipes if each.may_stream or manner not in _STREAMED]
        )
        tenant = rng.choice(sorted(self.keys))
        story = Story(len(self.stories), recipe.name, manner, tenant)
        self.stories.append(story)
        return story, Visit(
            story,
            recipe,
            self.gateways,
            self.keys[tenant],
            start=rng.randrange(len(self.gateways)),
            draw=rng.random(),
            patience=self.patience,
        )


@cache
def _hostile_requests() -> Sequence[tuple[str, dict[str, Any]]]:
    """Return paths and bodies that cost the gateway much, whether it rejects or answers them."""
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


class Visit:
    """One client with one request."""

    def __init__(
        self,
        story: Story,
        recipe: Recipe,
        gateways: Mapping[str, str],
        key: str,
        *,
        start: int,
        draw: float,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._story = story
        self._recipe = recipe
        self._gateways = list(gateways.items())
        self._key = key
        self._turn = start
        self._draw = draw
        self._deadline = story.began + patience
        self._idempotency_key = str(uuid.UUID(int=int(draw * 2**64) << 64 | story.number))
        self._told_before = 0
        """Number of the last event that a replay from the beginning repeats."""
        self._farewell: dict[str, Any] | None = None
        """The error with which a stream has ended whose answer goes on."""

    async def run(self) -> None:
        """Do what a client of this manner does, until it is over."""
        acts: dict[Manner, Callable[[], Any]] = {
            Manner.STREAM: self._stream,
            Manner.RETURNING: self._stream,
            Manner.LEAVING: self._stream,
            Manner.REPEATING_STREAM: self._stream,
            Manner.WHOLE: self._whole,
            Manner.REPEATING: self._whole,
            Manner.BACKGROUND: self._background,
            Manner.CANCELLING: self._background,
            Manner.HOSTILE: self._hostile,
        }
        await acts[self._story.manner]()
        self._check()

    @property
    def _comes_back(self) -> bool:
        return self._story.manner not in _SINGLE

    def _check(self) -> None:
        story, is_streamed = self._story, self._story.manner in _STREAMED
        if story.ending is Ending.UNFINISHED:
            story.end(Ending.HUNG)
        if story.manner is Manner.HOSTILE:
            return
        expected = self._recipe.expected[is_streamed]
        if difference := story.transcript.difference(expected):
            story.complain(difference)

    async def _stream(self) -> None:
        story = self._story
        body = self._recipe.body_of(stream=True)
        headers = {}
        if story.manner is Manner.REPEATING_STREAM:
            headers["idempotency-key"] = self._idempotency_key
        while story.ending is Ending.UNFINISHED and self._has_patience():
            if story.manner is not Manner.REPEATING_STREAM and story.last_number:
                headers["last-event-id"] = f"{story.request_id}:{story.last_number}"
            self._told_before = story.last_number if "idempotency-key" in headers else 0
            self._farewell = None
            reply = await self._talk(self._recipe.path, body, headers, self._on_event)
            await self._after(reply, is_over=story.transcript.is_done)

    async def _whole(self) -> None:
        story = self._story
        body = self._recipe.body_of(stream=False)
        headers = {}
        if story.manner is Manner.REPEATING:
            headers["idempotency-key"] = self._idempotency_key
        while story.ending is Ending.UNFINISHED and self._has_patience():
            reply = await self._talk(self._recipe.path, body, headers)
            if reply.is_complete and reply.status == 200:
                self._read_whole(reply)
            await self._after(reply, is_over=story.transcript.is_done)

    def _read_whole(self, reply: Reply) -> None:
        body = reply.json
        self._story.identify(body)
        self._story.transcript.add(body)
        self._story.transcript.is_done = True

    async def _hostile(self) -> None:
        """Send a request that is expensive to reject. It is rejected, or answered and paid."""
        requests = _hostile_requests()
        path, body = requests[int(self._draw * len(requests))]
        reply = await self._talk(path, {"model": MODEL, "max_tokens": 20} | body, {})
        if reply.is_complete and reply.status == 200:
            self._read_whole(reply)
        if reply.is_complete and reply.status in DENIALS:
            self._story.end(Ending.DENIED)
        else:
            await self._after(reply, is_over=self._story.transcript.is_done)

    async def _background(self) -> None:
        """Start a request in the background and look for its end, at any gateway."""
        story = self._story
        body = {**self._recipe.body_of(stream=False), "background": True}
        headers = {"idempotency-key": self._idempotency_key}
        while not story.request_id and story.ending is Ending.UNFINISHED and self._has_patience():
            reply = await self._talk(self._recipe.path, body, headers)
            if reply.is_complete and reply.status in (200, 202):
                story.identify(reply.json)
            await self._after(reply, is_over=False)
        if story.manner is Manner.CANCELLING and story.request_id:
            await asyncio.sleep(self._draw * 2)
            await self._cancel()
        while story.ending is Ending.UNFINISHED and story.request_id and self._has_patience():
            await asyncio.sleep(PAUSE_SECONDS)
            reply = await self._talk(f"{self._recipe.path}/{story.request_id}", None, {})
            if reply.is_complete and reply.status == 200:
                self._read_state(reply)
            await self._after(reply, is_over=story.transcript.is_done)

    async def _cancel(self) -> None:
        story = self._story
        while self._has_patience():
            reply = await self._talk(f"{self._recipe.path}/{story.request_id}/cancel", {}, {})
            if reply.is_complete and reply.status == 200:
                return
            await self._after(reply, is_over=False)
            if story.ending is not Ending.UNFINISHED:
                return

    def _read_state(self, reply: Reply) -> None:
        body = reply.json
        story = self._story
        status = body.get("status", "completed")
        if "choices" in body and status == "completed":
            self._read_whole(reply)
        elif status == "cancelled" and story.manner is Manner.CANCELLING:
            story.end(Ending.CANCELLED)
        elif status not in ("queued", "in_progress"):
            story.complain(f"its state is {reply.body[:200]!r}")
            story.end(Ending.FAILED)

    async def _talk(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        on_event: Callable[[Event], bool] | None = None,
    ) -> Reply:
        story = self._story
        if story.stretches:
            story.returns += 1
        # Like a load balancer, it goes on to the next gateway where nobody takes the connection.
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
                headers=headers,
                on_event=on_event,
            )
            if reply.was_reached:
                break
        is_broken = not (reply.is_complete or reply.has_left)
        is_refusal = reply.status == 503 and reply.is_complete
        code = reply.json.get("error", {}).get("code", "") if is_refusal else ""
        story.stretches.append(Stretch(gateway, began, time.monotonic(), is_broken, code))
        story.statuses.append(reply.status)
        kind = "GET" if body is None else "POST"
        state = "complete" if reply.is_complete else "left" if reply.has_left else "broken"
        comes_from = headers.get("last-event-id", "")
        story.note(
            f"{kind} {path} at {gateway} {f'after {comes_from} ' if comes_from else ''}"
            f"-> {reply.status}, {state}, {story.last_number} events, "
            f"{story.transcript.tokens} tokens {self._error_of(reply)}"
        )
        return reply

    def _error_of(self, reply: Reply) -> str:
        if self._farewell is not None:
            return f"farewell: {json.dumps(self._farewell)}"
        if self._story.transcript.error:
            return json.dumps(self._story.transcript.error)
        return reply.body[:300].decode(errors="replace") if reply.status not in (0, 200) else ""

    async def _after(self, reply: Reply, *, is_over: bool) -> None:
        """Decide how a story goes on after a connection has ended."""
        story = self._story
        if story.transcript.error is not None:
            story.end(Ending.FAILED)
        elif is_over:
            story.end(Ending.COMPLETE)
        elif reply.has_left:
            story.end(Ending.LEFT)
        elif reply.is_late:
            story.end(Ending.HUNG)
        elif self._farewell is not None:
            await self._after_farewell(self._farewell)
        elif reply.status in COME_AGAIN and reply.is_complete and not _is_conflict(reply):
            await self._come_again(reply)
        elif not reply.is_complete:
            await self._broken(reply)
        elif reply.status not in (200, 202):
            story.complain(f"status {reply.status}: {reply.body[:300]!r}")
            story.end(Ending.FAILED)
        elif reply.is_stream:
            story.complain("a stream ended without [DONE]")
            story.end(Ending.FAILED)

    async def _after_farewell(self, error: dict[str, Any]) -> None:
        if self._comes_back and self._has_begun:
            await asyncio.sleep(PAUSE_SECONDS)
            return
        self._story.farewell = str(error["code"])
        self._story.end(Ending.CUT)

    async def _come_again(self, reply: Reply) -> None:
        story = self._story
        if reply.retry_after is None:
            story.complain(f"status {reply.status} without Retry-After")
        if not (self._comes_back and self._has_begun):
            story.end(Ending.REFUSED)
            return
        await asyncio.sleep(min(reply.retry_after or 1.0, MOST_PAUSE_SECONDS))

    async def _broken(self, reply: Reply) -> None:
        if not (self._comes_back and self._has_begun):
            self._story.end(Ending.CUT if reply.was_reached else Ending.UNREACHED)
            return
        await asyncio.sleep(PAUSE_SECONDS)

    @property
    def _has_begun(self) -> bool:
        """Whether the client has something with which it can come back: a key, or an event's id."""
        return self._story.manner is not Manner.RETURNING or self._story.last_number > 0

    def _has_patience(self) -> bool:
        return time.monotonic() < self._deadline

    def _on_event(self, event: Event) -> bool:
        """Take in an event; return whether the client leaves now."""
        story = self._story
        number = self._number(event)
        is_new = number > story.last_number
        if event.data == DONE:
            story.last_number = max(number, story.last_number)
            # A stream that ends before its answer repeats the id of the last event.
            story.transcript.is_done = is_new and story.transcript.error is None
            return False
        body = json.loads(event.data)
        if not is_new:
            self._repeated(number, body)
            return False
        if number != story.last_number + 1:
            story.complain(f"event {number} came after {story.last_number}")
        story.last_number = number
        story.received(event.at)
        story.identify(body)
        story.transcript.add(body)
        return story.manner is Manner.LEAVING and story.transcript.tokens > self._draw * 60

    def _repeated(self, number: int, body: dict[str, Any]) -> None:
        """Take in an event whose number was there before: of a replay, or of a stream's early end."""
        if "error" in body:
            self._farewell = body["error"]
        elif body["choices"] and number > self._told_before:
            self._story.complain(f"event {number} came twice")

    def _number(self, event: Event) -> int:
        """Return an event's number; without an id it is taken for the next one."""
        if not event.id:
            if self._story.manner is Manner.RETURNING and not self._story.complaints:
                self._story.complain("an event has no id")
            return self._story.last_number + 1
        request_id, _, number = event.id.rpartition(":")
        self._story.identify({"id": request_id})
        return int(number)


def _is_conflict(reply: Reply) -> bool:
    """Whether a 409 is not of the kind that passes."""
    return reply.status == 409 and reply.json["error"]["code"] != "idempotency_in_progress"


async def answer_once(url: str, key: str, recipe: Recipe, *, stream: bool) -> None:
    """Have a recipe answered without any disturbance, and remember the answer. Raises AssertionError."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        story = Story(0, recipe.name, Manner.STREAM if stream else Manner.WHOLE, "")
        recipe.expected[stream] = story.transcript
        await Visit(story, recipe, {"gateway": url}, key, start=0, draw=0).run()
        if story.ending is not Ending.REFUSED or time.monotonic() > deadline:
            break
        # A deployment that has only just started on a crowded machine may say that it cannot yet.
        await asyncio.sleep(1)
    assert story.ending is Ending.COMPLETE, story.reported(story.began)
    assert not story.complaints, story.reported(story.began)

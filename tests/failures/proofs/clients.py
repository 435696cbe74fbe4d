"""Clients that send requests of all kinds, some of which disconnect early."""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.failures.proofs.client import Answer, ask

GONE_PAUSE_SECONDS = 0.3
"""Before the next request, if no gateway was reachable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One request, and when its client disconnects."""

    credential: str
    body: dict[str, Any]
    leave_after: float | None = None
    leave_at: int | None = None


@dataclass(slots=True)
class Clients:
    """The clients, their requests and the responses."""

    gateways: list[str]
    answers: list[tuple[Wish, Answer]] = field(default_factory=list)
    unreached: int = 0
    """Requests that reached no gateway."""

    async def run(self, wishes: Iterator[Wish], *, clients: int) -> None:
        """Let clients send requests until there are no more wishes."""
        await asyncio.gather(*(self._client(wishes, number) for number in range(clients)))

    async def _client(self, wishes: Iterator[Wish], number: int) -> None:
        for wish in wishes:
            number += 1
            answer = await ask(
                self.gateways[number % len(self.gateways)],
                wish.credential,
                leave_after=wish.leave_after,
                leave_at=wish.leave_at,
                **wish.body,
            )
            if answer.was_reached:
                self.answers.append((wish, answer))
            else:
                self.unreached += 1
                await asyncio.sleep(GONE_PAUSE_SECONDS)


def wishes(
    rng: random.Random, credentials: list[str], *, is_over: Callable[[], bool]
) -> Iterator[Wish]:
    """Yield wishes until the end time."""
    while not is_over():
        yield _wish(rng, rng.choice(credentials))


def _wish(rng: random.Random, credential: str) -> Wish:
    body = _body(rng)
    leave_after = leave_at = None
    match rng.random():
        case draw if draw < 0.15:
            leave_after = rng.expovariate(20)  # In the queue, during prefill, or later.
        case draw if draw < 0.25:
            leave_at = rng.randint(1, 4_000)  # In the middle of a stream.
    return Wish(credential=credential, body=body, leave_after=leave_after, leave_at=leave_at)


def _body(rng: random.Random) -> dict[str, Any]:
    prompts = [
        [rng.randint(300, 1_000) for _ in range(rng.randint(1, 40))]
        for _ in range(rng.choice((1, 1, 1, 2, 3)))
    ]
    stream = rng.random() < 0.5
    n = rng.choice((1, 1, 1, 2, 3))
    return {
        "prompt": prompts if len(prompts) > 1 else prompts[0],
        "max_tokens": rng.randint(1, 40),
        "n": n,
        # A ranked response (`best_of`) cannot be streamed.
        **({} if stream else {"best_of": n + rng.choice((0, 0, 0, 2))}),
        "stream": stream,
        **({"return_token_ids": True} if stream else {}),
        "ignore_eos": rng.random() < 0.5,
        **({"stop": [" a", " the"]} if rng.random() < 0.2 else {}),
        "seed": rng.randint(0, 1_000_000),
    }

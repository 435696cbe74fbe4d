"""Kills gateways and background jobs under load, and measures the recovery."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.failures.proofs.client import Answer, ask
from tests.support.stack import Stack

READY_SECONDS = 240.0
"""Only a failure takes that long."""
HOLDING: dict[str, Any] = {
    "prompt": "x",
    "max_tokens": 1_900,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}
"""A request that is still running when its gateway is killed."""


@dataclass(slots=True)
class Kills:
    """The kills of a deployment with gateways `gateway-1` and `gateway-2`, and their effects."""

    stack: Stack
    over_at: float | None = None
    """After the last kill and restart."""
    killed: list[str] = field(default_factory=list)
    refusals: int = 0
    """Requests of this class that a gateway refused, or may have, because it had just started."""
    cut: Answer | None = None
    """What the client received of the last request of the held key."""
    lost_place_at: float | None = None
    """When the gateway with the last request of the held key was killed."""

    async def run(
        self,
        rng: random.Random,
        *,
        kills: int,
        pause_seconds: float,
        held_key: str,
        free_key: str,
    ) -> None:
        """Kill each kind of process so many times, and restart it."""
        for number in range(kills):
            await asyncio.sleep(rng.uniform(0.2, pause_seconds))
            is_last = number == kills - 1
            held = await self._held(number % 2, held_key) if is_last else None
            killed_at = self._kill_gateway(number % 2)
            if held is not None:
                self.cut = await held
                assert not self.cut.is_complete
                self.lost_place_at = killed_at
            await self._restart_gateway(number % 2, free_key)
            await asyncio.sleep(rng.uniform(0.2, pause_seconds))
            self._kill_jobs()
        self.over_at = time.monotonic()

    async def _held(self, index: int, key: str) -> "asyncio.Task[Answer]":
        """Send a request that takes the key's only place, and wait for some of its tokens."""
        while True:
            answer = Answer()
            held = asyncio.create_task(
                ask(self.stack.gateways[index], key, answer=answer, **HOLDING)
            )
            while not (answer.status == 200 and answer.received_tokens) and not held.done():
                await asyncio.sleep(0.01)
            # On a busy machine a gateway may miss a reply of Redis or of the worker.
            if answer.status != 503:
                return held
            self.refusals += 1
            await asyncio.sleep(float(answer.headers["retry-after"]))

    def _kill_gateway(self, index: int) -> float:
        name = f"gateway-{index + 1}"
        self.stack.kill(name)
        self.killed.append(name)
        return time.monotonic()

    async def _restart_gateway(self, index: int, key: str) -> None:
        """Restart a gateway, and wait until it has served a request.

        Raises AssertionError with the logs if it does not.
        """
        name, url = f"gateway-{index + 1}", self.stack.gateways[index]
        self.stack.launch_gateway(name, port=urlsplit(url).port or 0)
        deadline = time.monotonic() + READY_SECONDS
        while (answer := await ask(url, key, prompt="x", max_tokens=1)).status != 200:
            self.refusals += _may_be_refused(answer)
            logs = {each: self.stack.log(each)[-3_000:] for each in (name, "worker")}
            assert time.monotonic() < deadline, (answer, logs)
            assert self.stack.processes[name].poll() is None, logs
            await asyncio.sleep(0.1)

    def _kill_jobs(self) -> None:
        self.stack.kill("jobs")
        self.killed.append("jobs")
        self.stack.start_jobs()


@dataclass(frozen=True, slots=True)
class Freed:
    """The result of waiting for a key's only place after its gateway died."""

    refusals: int
    """Requests refused because the place was taken."""
    seconds: float


async def wait_for_place(kills: Kills, key: str) -> Freed:
    """Retry until the key's only place is free after the death of the gateway that held it."""
    while kills.lost_place_at is None:
        await asyncio.sleep(0.05)
    refusals = 0
    while True:
        answer = await _ask_a_living_gateway(kills, key)
        if answer.status == 200:
            return Freed(refusals, time.monotonic() - kills.lost_place_at)
        # A gateway that has just started may have no worker registered.
        assert answer.status in (0, 429, 503), answer.body
        refusals += answer.status == 429
        await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Waited:
    """The result of waiting for `Retry-After`."""

    told_ms: int
    statuses_before: list[int]
    """Of requests that were sent before that time had passed."""
    statuses_then: list[int]
    """Of the others, of which the last was sent when it had passed."""


async def wait_for_retry_after(kills: Kills, key: str) -> Waited:
    """Use up the key's requests of a minute, wait for `Retry-After`, and retry."""
    while True:
        answer = await _ask_a_living_gateway(kills, key)
        if answer.status == 429:
            break
    told_ms = int(answer.headers["retry-after-ms"])
    # The server's minute began between these two times.
    earliest, latest = (at + told_ms / 1000 for at in (answer.sent_at, answer.ended_at))
    answers = []
    await _sleep_until(earliest - 3)
    while time.monotonic() < earliest - 0.5:
        answers.append(await _ask_a_living_gateway(kills, key))
        await asyncio.sleep(0.1)
    await _sleep_until(latest)
    answers.append(await _ask_a_living_gateway(kills, key))
    before = [each.status for each in answers if each.ended_at < earliest]
    return Waited(told_ms, before, [each.status for each in answers[len(before) :]])


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(0, at - time.monotonic()))


async def _ask_a_living_gateway(kills: Kills, key: str) -> Answer:
    """Send to the first gateway, or to the other one while the first restarts."""
    answer = Answer()
    for url in kills.stack.gateways:
        answer = await ask(url, key, prompt="x", max_tokens=1)
        kills.refusals += _may_be_refused(answer)
        if answer.status != 0:
            break
    return answer


def _may_be_refused(answer: Answer) -> bool:
    """Whether a gateway refused a request, but not for a limit, or died before it responded."""
    return answer.status == 503 or (answer.status == 0 and answer.was_reached)

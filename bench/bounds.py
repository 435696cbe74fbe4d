"""Check guaranteed time limits on two gateways with the scripted engine: `python -m bench.bounds`.

A heartbeat task in this process measures how long the machine, or this process, delayed everything.
This delay is subtracted from concurrent measurements. The program exits with 1 if a limit is
exceeded in more than one round of ten.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import httpx
from redis.asyncio import Redis

from bench.measure import MeasureError
from bench.sluice import Sluice, running_sluice
from bench.starting import MODEL
from bench.systems import Deployment, Engine
from bench.tables import table
from gateway.accounts.keys.service import KeyService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database

TENANT: Final = "bounds"
SINGLE: Final = "single"
"""A tenant with at most one concurrent request."""
STREAMS: Final = 16
HOSTILE: Final = "(a|b)*a(a|b){20}"
"""A regex whose automaton needs more processor time than a request may use."""
_LONG_TOKENS: Final = 900
_BEAT_SECONDS: Final = 0.01
_POLL_SECONDS: Final = 0.005
_PATIENCE_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.2
"""A longer pause of a stream is that of a lost worker; an engine's step takes a tenth of it."""
DEPLOYMENT: Final = Deployment(
    engine=Engine.SCRIPTED, max_sequences=64, context_window=1024, step_seconds=0.02
)


@dataclass
class Beat:
    """Worst wake-up delay of a task that sleeps for a hundredth of a second."""

    worst: float = 0.0

    async def run(self) -> None:
        """Sleep and measure until cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_BEAT_SECONDS)
            self.worst = max(self.worst, time.monotonic() - before - _BEAT_SECONDS)


@dataclass
class Bound:
    """A guaranteed time limit."""

    text: str
    seconds: float
    measure: Callable[["Clients"], Awaitable[float]]
    """Performs one measurement, in seconds."""
    measured: list[float] = field(default_factory=list)
    held_up: list[float] = field(default_factory=list)

    @property
    def exceeded(self) -> int:
        """Rounds over the limit, after subtracting delays of the machine."""
        pairs = zip(self.measured, self.held_up, strict=True)
        return sum(took - lost > self.seconds for took, lost in pairs)

    def row(self) -> list[str]:
        """Return the row of the report."""
        return [
            self.text,
            f"{self.seconds:g}",
            f"{median(self.measured):.3f}",
            f"{max(self.measured):.3f}",
            f"{max(self.held_up):.3f}",
            f"{self.exceeded} of {len(self.measured)}",
        ]


class Clients:
    """Client operations that measure the limits."""

    def __init__(self, sluice: Sluice, http: httpx.AsyncClient, single_key: str) -> None:
        self.sluice = sluice
        self.urls = sluice.urls(2)
        self._http = http
        self._key = sluice.key(TENANT)
        self._single_key = single_key

    async def give_back_a_place(self) -> float:
        """Return the time from a client's disconnect until its tenant's only slot is free."""
        async with self._stream(self._single_key):
            _expect(429, await self._status(self.urls[1], self._single_key))
        return await self._seconds_until(
            partial(self._has_status, self.urls[1], self._single_key, 200)
        )

    async def stop_generating(self) -> float:
        """Return the time from a client's disconnect until the worker runs nothing."""
        async with self._stream(self._key):
            pass
        return await self._seconds_until(self._is_worker_idle)

    async def revoke_a_key(self) -> float:
        """Return the time from the revocation of a key until both gateways reject it."""
        database = Database(self.sluice.database_url)
        redis = Redis.from_url(f"redis://127.0.0.1:{self.sluice.redis_port}/0")
        try:
            keys = KeyService(database, ChangeAnnouncer(redis))
            created = await keys.create(TENANT, name="to be revoked")
            key = created.key.reveal()
            for url in self.urls:
                _expect(200, await self._status(url, key))
            await keys.revoke(TENANT, created.record.id)
            times = [
                self._seconds_until(partial(self._has_status, url, key, 401)) for url in self.urls
            ]
            return max(await asyncio.gather(*times))
        finally:
            await redis.aclose()
            await database.aclose()

    async def reject_without_redis(self) -> float:
        """Return the time until a request is rejected while Redis does not respond."""
        (redis,) = self.sluice.groups(1)["redis"]
        os.kill(redis, signal.SIGSTOP)
        try:
            began = time.monotonic()
            _expect(503, await self._status(self.urls[0], self._key))
            return time.monotonic() - began
        finally:
            os.kill(redis, signal.SIGCONT)
            for url in self.urls:
                await self._seconds_until(partial(self._has_status, url, self._key, 200))

    async def check_a_hostile_regex(self) -> float:
        """Return the longest pause of valid streams while the gateway checks a hostile regex."""
        begun, over = asyncio.Barrier(STREAMS + 1), asyncio.Event()
        streams = [asyncio.create_task(self._longest_pause(begun, over)) for _ in range(STREAMS)]
        await begun.wait()
        body = self._body(max_tokens=1, structured_outputs={"regex": HOSTILE})
        answer = await self._http.post(
            f"{self.urls[0]}/v1/completions", json=body, headers=_headers(self._key)
        )
        _expect(400, answer.status_code)
        over.set()
        return max(await asyncio.gather(*streams))

    async def resume_after_a_kill(self) -> float:
        """Return the pause of a stream whose worker is killed."""
        return await self._pause_after(signal.SIGKILL)

    async def resume_after_a_stop(self) -> float:
        """Return the pause of a stream whose worker is stopped, as if its machine was lost."""
        return await self._pause_after(signal.SIGSTOP)

    async def _pause_after(self, number: signal.Signals) -> float:
        worker, url = await asyncio.to_thread(self.sluice.start_worker, DEPLOYMENT)
        try:
            async with AsyncExitStack() as streams:
                # Claims alternate between idle workers.
                for _ in range(STREAMS):
                    reader = await streams.enter_async_context(self._stream(self._key))
                    if not await self._is_idle(url):
                        break
                else:
                    raise MeasureError(f"The second worker got none of {STREAMS} streams.")
                os.kill(worker.pid, number)
                last, pause = time.monotonic(), 0.0
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    # What was under way still arrives, within a few steps of the engine.
                    while pause < _PAUSE_SECONDS:
                        await reader.readuntil(b"data: ")
                        now = time.monotonic()
                        pause, last = now - last, now
                return pause
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            await asyncio.to_thread(worker.stop)

    async def _longest_pause(self, begun: asyncio.Barrier, over: asyncio.Event) -> float:
        longest = 0.0
        async with self._stream(self._key) as reader:
            await begun.wait()
            last = time.monotonic()
            while not over.is_set():
                await reader.readuntil(b"data: ")
                now = time.monotonic()
                longest, last = max(longest, now - last), now
        return longest

    async def _is_worker_idle(self) -> bool:
        return await self._is_idle(self.sluice.metrics_urls()[0])

    async def _is_idle(self, worker_url: str) -> bool:
        page = await self._http.get(f"{worker_url}/metrics")
        return "sluice_worker_jobs_running 0.0" in page.text

    async def _has_status(self, url: str, key: str, status: int) -> bool:
        return await self._status(url, key) == status

    async def _status(self, url: str, key: str) -> int:
        answer = await self._http.post(
            f"{url}/v1/completions", json=self._body(max_tokens=1), headers=_headers(key)
        )
        return answer.status_code

    async def _seconds_until(self, condition: Callable[[], Awaitable[bool]]) -> float:
        began = time.monotonic()
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while not await condition():  # noqa: ASYNC110 - what happens in other processes
                await asyncio.sleep(_POLL_SECONDS)
        return time.monotonic() - began

    @asynccontextmanager
    async def _stream(self, key: str) -> AsyncIterator[asyncio.StreamReader]:
        """Receive a stream's first event; at the end, close the connection like a killed client."""
        host, port = self.urls[0].removeprefix("http://").split(":")
        content = json.dumps(self._body(max_tokens=_LONG_TOKENS, stream=True)).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode()
                + content
            )
            await reader.readuntil(b"data: ")
            yield reader
        finally:
            writer.transport.abort()

    def _body(self, **more: Any) -> dict[str, Any]:
        return {"model": MODEL, "prompt": "The harbour", "ignore_eos": True, **more}


BOUNDS: Final = (
    ("a place of a tenant is free after its client ended", 0.5, Clients.give_back_a_place),
    ("the worker runs nothing after its client ended", 1.0, Clients.stop_generating),
    ("both gateways reject a revoked key", 1.0, Clients.revoke_a_key),
    ("pause of streams beside a hostile regex", 0.5, Clients.check_a_hostile_regex),
    ("pause of a stream whose worker is killed", 1.0, Clients.resume_after_a_kill),
    ("pause of a stream whose worker is stopped", 2.5, Clients.resume_after_a_stop),
    # Last: after an outage of Redis, no job counts as lost for SLUICE_RESUME_AFTER.
    ("a request is rejected while Redis does not answer", 2.0, Clients.reject_without_redis),
)


def _expect(status: int, received: int) -> None:
    if received != status:
        raise MeasureError(f"A gateway answered {received} instead of {status}.")


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def _measure(sluice: Sluice, rounds: int, single_key: str) -> list[Bound]:
    bounds = [Bound(*each) for each in BOUNDS]
    async with httpx.AsyncClient(timeout=_PATIENCE_SECONDS) as http:
        clients = await asyncio.to_thread(Clients, sluice, http, single_key)
        for _ in range(rounds):
            for bound in bounds:
                beat = Beat()
                beating = asyncio.create_task(beat.run())
                bound.measured.append(await bound.measure(clients))
                beating.cancel()
                with suppress(asyncio.CancelledError):
                    await beating
                bound.held_up.append(beat.worst)
    return bounds


@click.command("bounds")
@click.option("--rounds", type=click.IntRange(1, 100), default=10, show_default=True)
def main(*, rounds: int) -> None:
    """Measure each guaranteed time and print a table."""
    with (
        tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder,
        running_sluice(DEPLOYMENT, Path(folder)) as sluice,
    ):
        limit = "concurrent_requests=1"
        sluice.command("tenants", "create", SINGLE, "--id", SINGLE, "--limit", limit)
        created = sluice.create("keys", "create", "--tenant", SINGLE, "--name", "bench")
        bounds = asyncio.run(_measure(sluice, rounds, created["key"]))
    head = ("promise", "bound, s", "median, s", "worst, s", "held up, s", "exceeded")
    click.echo("\n".join(table(head, [bound.row() for bound in bounds])))
    if any(10 * bound.exceeded > rounds for bound in bounds):
        sys.exit(1)


if __name__ == "__main__":
    main()

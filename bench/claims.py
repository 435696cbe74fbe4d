"""What a claim costs Redis: `python -m bench.claims`.

Jobs of one tenant wait, and a worker claims one of them at a time; a new one takes its place. Half
of the jobs are turns of chats whose prefixes the worker holds. The time is that of the script
`job_claim` in Redis, from `INFO commandstats`.

Also prints what a job costs the server of its queue while requests of many tenants for one model
saturate it, and what the gateway spends on the digests of a prompt and on the choice of an alias.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Final

from redis.asyncio import Redis

from bench.starting import free_port, start
from bench.tables import table
from common import clock
from contract.affinity import prefix_affinity, resource_affinity, resource_digest
from contract.messages import AdapterRef, GenerationJob
from contract.prompts import packed
from contract.queue import AdapterRoom, Affinity, JobQueue, LeaseReport, Room
from contract.sampling import SamplingSpec
from contract.scripts.executor import SharedConnection
from gateway.cli.launch.launch_plan import redis_server
from gateway.records.aliases import Alias, Sticky
from gateway.records.times import EPOCH

_WAITING: Final = (1, 100, 10_000)
_CLAIMS: Final = 500
_PROMPT_TOKENS: Final = 2_500
_BLOCK_TOKENS: Final = 16
_CHATS: Final = 200
_ADAPTERS: Final = 8
_LEASE_MS: Final = 60_000
_TENANTS: Final = (1, 100, 1_000)
_SHORT_PROMPT_TOKENS: Final = 500
_BACKLOG: Final = 2_000
_BATCH: Final = 8
"""Jobs of a claim."""
_WORKERS: Final = 8
_TURNS: Final = 150
_ROOM: Final = Room(10**9, 10**6, 1, empty=True)
_PLENTY: Final = {
    "most_waiting": 10**6,
    "most_waiting_of_tenant": 10**6,
    "longest_wait_seconds": 10**6,
}


class _Queue:
    """A queue with a number of waiting jobs."""

    def __init__(self, redis: "Redis", waiting: int, *, affinity: bool, adapters: bool) -> None:
        self._redis = redis
        self._queue = JobQueue(redis, "model")
        self._waiting = waiting
        self._affinity = affinity
        self._adapters = [f"{number:064x}" for number in range(_ADAPTERS)] if adapters else []
        self._numbers = count()

    async def microseconds(self) -> float:
        """Return the median time of a claim in Redis."""
        await self._redis.flushall()
        if self._affinity:
            await self._hold()
        for _ in range(self._waiting):
            await self._enqueue()
        times = []
        for _ in range(_CLAIMS):
            times.append(await self._claim())
            await self._enqueue()
        return median(times)

    def _affinity_of(self, chat: int) -> bytes:
        if not self._affinity:
            return b""
        return prefix_affinity("salt", packed([chat] * _PROMPT_TOKENS), _BLOCK_TOKENS)

    async def _hold(self) -> None:
        """Let the worker hold every other chat, and another worker the rest."""
        for chat in range(_CHATS):
            affinity = self._affinity_of(chat)
            digests = [affinity[start : start + 8] for start in range(0, len(affinity), 12)]
            await self._queue.hold(f"w{chat % 2}", added=digests, ttl_ms=10**7)
        loaded = [resource_digest(each) for each in self._adapters]
        await self._queue.hold("w0", added=loaded, ttl_ms=10**7)

    async def _enqueue(self) -> None:
        number = next(self._numbers)
        affinity, adapter = self._affinity_of(number % _CHATS), None
        if self._adapters:
            sha256 = self._adapters[number % _ADAPTERS]
            adapter = AdapterRef(digest=sha256, rank=8, size=1)
            affinity += resource_affinity(sha256, 100) if self._affinity else b""
        job = GenerationJob(
            id=f"j{number}",
            handle=number,
            gateway="g",
            tenant="tenant",
            cache_salt="salt",
            prompt_token_ids=packed([number % _CHATS] * _PROMPT_TOKENS),
            max_tokens=100,
            sampling=SamplingSpec(seed=1),
            deadline_ms=clock.now_ms() + 10**7,
            adapter=adapter,
            affinity=affinity,
        )
        await self._queue.enqueue([job], weight=1.0, **_PLENTY)

    async def _claim(self) -> float:
        await self._redis.config_resetstat()
        result = await self._queue.claim(
            "w0",
            _ROOM,
            most_jobs=1,
            lease_ms=_LEASE_MS,
            # A patience that no job exceeds here.
            affinity=Affinity(10**7, 0.0) if self._affinity else Affinity(),
            adapters=AdapterRoom(self._adapters, 1) if self._adapters else None,
        )
        spent = await self._redis.info("commandstats")
        [claim] = result.claims
        await self._queue.finish("w0", LeaseReport(claim.job.id, claim.attempt, 1))
        await self._queue.forget([claim.job.id])
        return float(spent["cmdstat_evalsha"]["usec"])


async def _claims(port: int) -> list[list[str]]:
    redis = Redis(port=port)
    try:
        rows = []
        for affinity, adapters in product((False, True), repeat=2):
            queues = [
                _Queue(redis, waiting, affinity=affinity, adapters=adapters) for waiting in _WAITING
            ]
            times = [f"{await each.microseconds():.0f}" for each in queues]
            rows.append(["yes" if each else "no" for each in (affinity, adapters)] + times)
        return rows
    finally:
        await redis.aclose()


async def _hot_model(port: int) -> list[list[str]]:
    """Let requests of some tenants for one model pass its queue, as fast as its server can."""
    rows = []
    async with Redis(port=port) as redis:
        for tenants in _TENANTS:
            await redis.flushall()
            shared = SharedConnection(redis, timeout_seconds=60.0)
            try:
                rows.append(await _saturated(redis, JobQueue(shared, "model"), tenants))
            finally:
                await shared.aclose()
    return rows


async def _saturated(redis: "Redis", queue: JobQueue, tenants: int) -> list[str]:
    """Return the tenants, the CPU of Redis for a job, and the jobs a second of a full core."""
    numbers = count()

    async def enqueue() -> None:
        number = next(numbers)
        job = GenerationJob(
            id=f"j{number}",
            handle=number,
            gateway="g",
            tenant=f"tenant-{number % tenants}",
            cache_salt="salt",
            prompt_token_ids=packed(range(_SHORT_PROMPT_TOKENS)),
            max_tokens=100,
            sampling=SamplingSpec(seed=1),
            deadline_ms=clock.now_ms() + 10**7,
        )
        await queue.enqueue([job], weight=1.0, **_PLENTY)

    async def work(worker: str) -> None:
        claimed = await queue.claim(worker, _ROOM, most_jobs=_BATCH, lease_ms=_LEASE_MS)
        done = [LeaseReport(each.job.id, each.attempt, 1) for each in claimed.claims]
        await queue.finish(worker, *done)
        await queue.forget([each.job_id for each in done])

    async def turn() -> None:
        await asyncio.gather(
            *(enqueue() for _ in range(_BATCH * _WORKERS)),
            *(work(f"w{number}") for number in range(_WORKERS)),
        )

    await asyncio.gather(*(enqueue() for _ in range(_BACKLOG)))
    await turn()
    before, jobs = await _cpu_seconds(redis), next(numbers)
    for _ in range(_TURNS):
        await turn()
    spent = 1e6 * (await _cpu_seconds(redis) - before) / (next(numbers) - jobs - 1)
    return [f"{tenants:,}", f"{spent:.0f}", f"{1e6 / spent:,.0f}"]


async def _cpu_seconds(redis: "Redis") -> float:
    spent = await redis.info("cpu")
    return float(spent["used_cpu_user"]) + float(spent["used_cpu_sys"])


def _gateway() -> list[list[str]]:
    prompt = packed(range(_PROMPT_TOKENS))
    alias = Alias(
        name="chat",
        weights={"a": 90, "b": 10},
        sticky=Sticky.USER,
        fallback=None,
        sunset_at=None,
        deprecated_at=None,
        replacement="a",
        created_at=EPOCH,
    )
    aliases = {"chat": alias}
    steps: dict[str, Callable[[], object]] = {
        f"digests of {_PROMPT_TOKENS:,} prompt tokens": lambda: prefix_affinity(
            "salt", prompt, _BLOCK_TOKENS
        ),
        "a plain model: no alias found": lambda: aliases.get("other"),
        "an alias of two models": lambda: aliases["chat"].choose("tenant", "user"),
    }
    return [[name, f"{_best(step):.2f}"] for name, step in steps.items()]


def _best(step: Callable[[], object]) -> float:
    """Return the microseconds of CPU of a call: the least of several means."""
    means = []
    for _ in range(20):
        began = time.process_time_ns()
        for _ in range(1_000):
            step()
        means.append((time.process_time_ns() - began) / 1e6)
    return min(means)


def main() -> None:
    """Measure and print all tables."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        command = [redis_server(), "--port", str(port), "--save", ""]
        server = start("redis", command, folder=Path(folder), environment={})
        try:
            time.sleep(1.0)
            rows = asyncio.run(_claims(port))
            hot = asyncio.run(_hot_model(port))
        finally:
            server.stop()
    waiting = [f"{number:,} waiting, us" for number in _WAITING]
    print("\n".join(table(["affinity", "adapters", *waiting], rows)))
    headings = ["tenants of one model", "CPU of Redis, us a job", "jobs a second of a core"]
    print("\n".join(["", *table(headings, hot)]))
    print("\n".join(["", *table(["step of the gateway", "us of CPU"], _gateway())]))


if __name__ == "__main__":
    main()

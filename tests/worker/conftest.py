"""Fixtures of the worker's tests: a real Redis, the scripted engine, and a fake gateway."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from tokenizers import Tokenizer
from typing_extensions import override

from common import clock
from contract import keys, messages
from contract.messages import (
    Delta,
    Frame,
    GenerationJob,
    JobFailed,
    JobFinished,
    JobPreempted,
    JobReturned,
    Resumption,
    SequenceProgress,
)
from contract.prompts import packed
from contract.queue import JobQueue
from contract.sampling import SamplingSpec
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer
from tests.support.stack import make_model
from worker.engine.base import Engine, EngineRequest, EngineStep
from worker.engine.scripted import Script, ScriptedEngine
from worker.execution.runner import Runner
from worker.queue.link import Link

if TYPE_CHECKING:
    from tests.worker.real_engine import EngineSlot

ROOT = Path(__file__).parents[2]
MODEL_FOLDER = ROOT / "worker" / "demo_model" / "checkpoint"
MODEL = "demo"
WORKER = "w1"
ENDLESS = 50_000
"""Tokens that no scripted engine generates before a test has ended."""
LEASE_MS = 60_000
"""Lease of workers in the test process, so long that no stall of the machine expires it."""


def connect(server: RedisServer, *, retries: int = 3) -> Redis:
    """Return a client that gives a command up after `retries` more attempts."""
    # Without a timeout: a server that waits for the processor is not an outage.
    return Redis.from_url(server.url, retry=Retry(NoBackoff(), retries))


@pytest.fixture(autouse=True)
def patient_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ending workers enough time to write and hand back everything on a busy machine."""
    monkeypatch.setattr("worker.execution.runner._RETURN_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def eager_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers renew leases, and so detect lost ones, five times a second."""
    monkeypatch.setattr("worker.execution.runner._RENEWALS_PER_LEASE", LEASE_MS / 200)


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    async with connect(redis_server) as client:
        await client.flushall()
        yield client


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine_slot() -> AsyncIterator["EngineSlot"]:
    """The real engine of this process; tests with the same settings share a start."""
    from tests.worker.real_engine import EngineSlot

    async with EngineSlot() as slot:
        yield slot


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the vision model in a separate process: its imports must not affect the engine."""
    folder = tmp_path_factory.mktemp("vision")
    make_model("tests.support.vision_model", MODEL_FOLDER, folder, log=folder / "log")
    return folder


_numbers = count(1)


def make_job(**changes: Any) -> GenerationJob:
    """Return a job of 3 prompt and 8 completion tokens for gateway `g1`, changed as asked."""
    number = next(_numbers)
    seed = changes.pop("seed", number)
    sampling = changes.pop("sampling", SamplingSpec(seed=seed))
    fields: dict[str, Any] = {
        "id": f"job-{number}",
        "handle": number,
        "gateway": "g1",
        "tenant": "tenant",
        "cache_salt": "salt",
        "prompt_token_ids": [300, 301, 302],
        "max_tokens": 8,
        "sampling": sampling,
        "deadline_ms": clock.now_ms() + 600_000,
        "stream": True,
    }
    if "n" in changes:
        fields["best_of"] = changes["n"]
    fields |= changes
    return GenerationJob(**fields | {"prompt_token_ids": packed(fields["prompt_token_ids"])})


class Gateway:
    """Enqueues jobs, and stores their replies by handle."""

    def __init__(self, redis: Redis, name: str = "g1") -> None:
        self.redis = redis
        self.name = name
        self.queue = JobQueue(redis, MODEL)
        self.frames: list[Frame] = []
        self._last = "0"

    async def live(self) -> None:
        await self.redis.set(keys.gateway_alive(self.name), 1)

    async def enqueue(self, *jobs: GenerationJob, weight: float = 1.0) -> None:
        await self.live()
        await self.queue.enqueue(
            jobs,
            weight=weight,
            most_waiting=10_000,
            most_waiting_of_tenant=10_000,
            longest_wait_seconds=3600,
        )

    async def begin(self, *jobs: GenerationJob) -> None:
        """Enqueue jobs, and read until each has a reply."""
        await self.enqueue(*jobs)
        await self.read_until(lambda: all(self.deltas(job) for job in jobs))

    async def read(self) -> None:
        """Take in the frames written since the last call, waiting a moment for the first."""
        entries: Any = await self.redis.xread({keys.replies(self.name): self._last}, block=20)
        streams = entries.values() if isinstance(entries, dict) else [e for _, e in entries or []]
        for stream in streams:
            for entry_id, values in stream[0] if isinstance(entries, dict) else stream:
                self._last = entry_id
                self.frames.append(messages.decode_frame(values[b"f"]))

    async def read_until(
        self, condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS
    ) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await self.read()

    async def finished(self, *jobs: GenerationJob, seconds: float = PATIENCE_SECONDS) -> None:
        """Read until all these jobs have finished or failed."""
        wanted = {job.handle for job in jobs}
        await self.read_until(lambda: wanted <= self.ended_handles(), seconds=seconds)

    async def lost(self, *jobs: GenerationJob) -> None:
        """Wait until the leases of these jobs have expired; each is reported once in a while."""
        missing = {job.id for job in jobs}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while missing:
                missing -= {lost.job_id for lost in await self.queue.reclaim()}
                await asyncio.sleep(0.01)

    def ends(self) -> list[JobFinished | JobFailed]:
        ends: list[JobFinished | JobFailed] = []
        for frame in self.frames:
            ends += frame.finished
            ends += frame.failed
        return ends

    def ended_handles(self) -> set[int]:
        return {end.handle for end in self.ends()}

    def deltas(self, job: GenerationJob, choice: int = 0) -> list[Delta]:
        return [
            delta
            for frame in self.frames
            for delta in frame.deltas
            if (delta.handle, delta.choice) == (job.handle, choice)
        ]

    def returned(self, job: GenerationJob) -> list[JobReturned]:
        return [
            each for frame in self.frames for each in frame.returned if each.handle == job.handle
        ]

    def preempted(self, job: GenerationJob) -> list[JobPreempted]:
        return [
            each for frame in self.frames for each in frame.preempted if each.handle == job.handle
        ]

    def token_ids(self, job: GenerationJob, choice: int = 0) -> list[int]:
        return [each for delta in self.deltas(job, choice) for each in delta.token_ids]

    def text(self, job: GenerationJob, choice: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas(job, choice))

    def end(self, job: GenerationJob) -> JobFinished | JobFailed:
        ends = [end for end in self.ends() if end.handle == job.handle]
        assert len(ends) == 1
        return ends[0]


def resumed(gateway: Gateway, job: GenerationJob) -> GenerationJob:
    """Return a job that resumes after the tokens that a gateway has received."""
    progress = []
    for index in range(job.sequences):
        deltas = gateway.deltas(job, index)
        last = deltas[-1] if deltas else Delta(job.handle, 0, index, 0, "", [])
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        progress.append(
            SequenceProgress(
                token_ids, last.finish_reason, last.stop_reason, last.cumulative_logprob
            )
        )
    started = [each for frame in gateway.frames for each in frame.started]
    mine = [each for each in started if each.handle == job.handle]
    resumption = Resumption(
        progress,
        prompt_tokens=mine[0].prompt_tokens if mine else 0,
        cached_tokens=mine[0].cached_tokens if mine else 0,
    )
    return msgspec.structs.replace(job, resumption=resumption)


@pytest.fixture
async def gateway(redis: Redis) -> Gateway:
    gateway = Gateway(redis)
    await gateway.live()
    return gateway


class Stepwise(ScriptedEngine):
    """Makes only the steps that a test allows, so that jobs do not advance in between."""

    def __init__(self, folder: Path, script: Script) -> None:
        super().__init__(folder, script)
        self._allowed = asyncio.Semaphore(0)
        self._unstarted = 0
        self.most = 0
        """The number of sequences at each step."""

    def allow(self, steps: int = ENDLESS) -> None:
        """Let it make some more steps."""
        self._unstarted += steps
        for _ in range(steps):
            self._allowed.release()

    @property
    def is_held(self) -> bool:
        """Whether it has started every allowed step."""
        return self._unstarted == 0

    @override
    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        await super().submit(requests)
        self.most = max(self.most, len(self._running) + len(self._waiting))

    @override
    async def step(self) -> EngineStep:
        await self._allowed.acquire()
        self._unstarted -= 1
        return await super().step()

    @override
    def die(self) -> None:
        super().die()
        self.allow(1)


@contextlib.asynccontextmanager
async def running_worker(
    redis_server: RedisServer,
    script: Script,
    *,
    worker: str = WORKER,
    lease_ms: int = LEASE_MS,
    most_pending_deltas: int = 100_000,
    chunk_cache_bytes: int = 0,
    gather_seconds: float = 0.0,
    stall_seconds: float = 600.0,
    preempted_share: float = 1.0,
    engine_type: type[ScriptedEngine] = ScriptedEngine,
    **settings: Any,
) -> AsyncIterator[tuple[Runner, ScriptedEngine, "asyncio.Task[None]"]]:
    """Run a worker with the scripted engine on its own connection."""
    # Enough room for endless jobs.
    window = script.context_window or 2 * ENDLESS
    engine = engine_type(MODEL_FOLDER, replace(script, context_window=window))
    await engine.start()
    async with running_engine(
        redis_server,
        engine,
        worker=worker,
        lease_ms=lease_ms,
        most_pending_deltas=most_pending_deltas,
        chunk_cache_bytes=chunk_cache_bytes,
        gather_seconds=gather_seconds,
        stall_seconds=stall_seconds,
        preempted_share=preempted_share,
        **settings,
    ) as (runner, task):
        yield runner, engine, task


@contextlib.asynccontextmanager
async def running_engine(
    redis_server: RedisServer,
    engine: Engine,
    *,
    worker: str = WORKER,
    lease_ms: int = LEASE_MS,
    most_pending_deltas: int = 100_000,
    chunk_cache_bytes: int = 0,
    **settings: Any,
) -> AsyncIterator[tuple[Runner, "asyncio.Task[None]"]]:
    """Run a worker with a started engine on its own connection."""
    async with connect(redis_server, retries=0) as client:
        link = Link(
            client,
            MODEL,
            worker=worker,
            lease_ms=lease_ms,
            most_pending_deltas=most_pending_deltas,
            chunk_cache_bytes=chunk_cache_bytes,
        )
        linked = asyncio.create_task(link.run())
        runner = Runner(link, engine, **settings)
        task = asyncio.create_task(runner.run())
        try:
            yield runner, task
        finally:
            runner.stop()
            await asyncio.gather(task, return_exceptions=True)
            linked.cancel()
            await asyncio.gather(linked, return_exceptions=True)
            await link.aclose()

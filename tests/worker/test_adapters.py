"""Adapters in a worker with the scripted engine: downloads, slots, evictions, charges, failures."""

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from typing_extensions import override

from contract import keys
from contract.adapters import CONFIG_FILE, WEIGHTS_FILE, digest_of, folder_of
from contract.affinity import resource_digest
from contract.messages import AdapterRef, GenerationJob, JobFailed, JobReturned, ReturnReason
from contract.outcomes import FailureCode
from tests.support.adapters import RANK, write_adapter
from tests.support.redis_server import RedisServer
from tests.worker.conftest import ENDLESS, MODEL, WORKER, Gateway, make_job, running_worker
from worker.adapters.files import AdapterFiles, StoreFailedError, WrongFilesError
from worker.engine.base import AdapterLimits, EngineAdapter, EngineStep
from worker.engine.scripted import Script, ScriptedEngine

TWO_OF_THREE = Script(
    step_seconds=0.002, adapters=AdapterLimits(slots=2, loaded=3, max_rank=8, modules={})
)
UNITS_PER_SECOND = 10**9


class Store:
    """An object store in a folder, and a worker's copies of its adapters."""

    def __init__(self, folder: Path) -> None:
        self.place, self.copies = folder / "store", folder / "copies"

    def add(self, number: int) -> AdapterRef:
        """Store an adapter."""
        source = Path(write_adapter(self.place.parent / f"source-{number}", alpha=number + 1))
        content = (source / CONFIG_FILE).read_bytes()
        weights = (source / WEIGHTS_FILE).read_bytes()
        digest = digest_of(content, hashlib.sha256(weights).hexdigest())
        shutil.copytree(source, self.place / folder_of(digest))
        return AdapterRef(digest, RANK, len(content) + len(weights))

    def files(self, *, most_bytes: int = 10**9) -> AdapterFiles:
        return AdapterFiles(str(self.place), self.copies, most_bytes=most_bytes)

    def weights(self, adapter: AdapterRef) -> Path:
        return self.place / folder_of(adapter.digest) / WEIGHTS_FILE


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def worker(
    redis_server: RedisServer, store: Store
) -> Callable[[], AbstractAsyncContextManager[Any]]:
    """Runs a worker with two slots that keeps three adapters loaded."""
    return partial(
        running_worker,
        redis_server,
        TWO_OF_THREE,
        adapter_files=store.files(),
        adapter_load_units=UNITS_PER_SECOND,
    )


async def get(files: AdapterFiles, adapter: AdapterRef, *, kept: Collection[str]) -> Path:
    """Return the folder of an adapter, which other workers may remove."""
    async with files.using(adapter, kept=kept) as folder:
        return folder


async def loaded(redis: Redis, *adapters: AdapterRef) -> list[bool]:
    """Return which adapters claims prefer the worker for."""
    digests = [resource_digest(each.digest) for each in adapters]
    return [bool(each) for each in await redis.smismember(keys.held(MODEL, WORKER), digests)]


async def test_each_job_runs_with_its_adapter_and_the_oldest_is_evicted(
    redis: Redis, gateway: Gateway, worker: Any, store: Store
) -> None:
    adapters = [store.add(number) for number in range(4)]
    same: dict[str, Any] = {"seed": 5, "max_tokens": 12}
    async with worker() as (_, engine, _):
        plain = make_job(**same)
        jobs = [make_job(adapter=each, **same) for each in adapters]
        await gateway.enqueue(plain, *jobs)
        await gateway.finished(plain, *jobs)
        texts = [gateway.text(job) for job in (plain, *jobs)]
        assert len({*texts}) == 5
        assert len(engine._adapters) == 3
        last = max(each.number for each in engine._adapters)
        again = [make_job(adapter=each, **same) for each in reversed(adapters)]
        await gateway.enqueue(*again)
        await gateway.finished(*again)
        assert [gateway.text(job) for job in reversed(again)] == texts[1:]
        numbers = {each.number for each in engine._adapters}

        async def is_published() -> bool:
            return sum(await loaded(redis, *adapters)) == 3

        while not await is_published():
            await gateway.read()
    # No number was used again: an engine that still has an adapter must not take it for another.
    assert max(numbers) > last


async def test_sleep_unloads_all_adapters(gateway: Gateway, worker: Any, store: Store) -> None:
    adapters = [store.add(number) for number in range(2)]
    changes: list[list[str]] = []
    async with worker(on_adapters_changed=changes.append) as (runner, engine, task):
        jobs = [make_job(adapter=each) for each in adapters]
        await gateway.enqueue(*jobs)
        await gateway.finished(*jobs)
        assert len(engine._adapters) == 2
        runner.stop()
        await task
        await runner.sleep()
        assert engine._adapters == set()
    assert changes[-1] == []


async def test_running_jobs_never_use_more_adapters_than_slots(
    gateway: Gateway, worker: Any, store: Store
) -> None:
    first, second, third = (store.add(number) for number in range(3))
    async with worker() as (_, _, _):
        running = [make_job(adapter=each, max_tokens=ENDLESS) for each in (first, second)]
        await gateway.begin(*running)
        waiting, plain = make_job(adapter=third), make_job(tenant="other")
        await gateway.enqueue(waiting)
        await gateway.enqueue(plain)
        await gateway.finished(plain)
        assert not gateway.deltas(waiting)
        await gateway.queue.cancel(running[0].id, running[0].tenant)
        await gateway.finished(waiting)
        assert gateway.deltas(waiting)


async def test_load_is_charged_to_its_tenant_once(
    redis: Redis, gateway: Gateway, worker: Any, store: Store
) -> None:
    adapter = store.add(0)

    async def counter(tenant: str) -> float:
        return float(await redis.hget(keys.service_counters(MODEL), tenant) or 0)

    async with worker():
        for tenant in ("first", "second"):
            job = make_job(tenant=tenant, adapter=adapter)
            await gateway.enqueue(job)
            await gateway.finished(job)
    assert await counter("first") > 1000
    # The counter of a tenant that was idle is lifted, but not charged for the load.
    assert await counter("second") - await counter("first") < 1000


async def test_missing_files_return_the_job_and_wrong_files_end_it(
    gateway: Gateway, worker: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.execution.adapters.RETRY_SECONDS", 0.05)
    missing, wrong = store.add(0), store.add(1)
    content = store.weights(missing).read_bytes()
    store.weights(missing).unlink()
    store.weights(wrong).write_bytes(store.weights(wrong).read_bytes()[:-1] + b"\x01")
    async with worker() as (_, engine, _):
        returned, failed = make_job(adapter=missing), make_job(adapter=wrong)
        await gateway.enqueue(returned)
        await gateway.read_until(lambda: gateway.returned(returned))
        expected = JobReturned(returned.handle, 1, ReturnReason.ADAPTER_FAILED, False)
        assert gateway.returned(returned) == [expected]
        await gateway.enqueue(failed)
        await gateway.finished(failed)
        end = gateway.end(failed)
        assert isinstance(end, JobFailed)
        assert (end.code, end.message) == (
            FailureCode.ADAPTER_FAILED,
            "The adapter could not be loaded.",
        )
        assert not engine._adapters
        # The worker still serves, and loads the adapter once its files are there.
        store.weights(missing).write_bytes(content)
        again = make_job(adapter=missing)
        await gateway.enqueue(again)
        await gateway.finished(again)
        assert gateway.deltas(again)


async def test_copies_are_verified_kept_and_bounded(store: Store) -> None:
    adapters = [store.add(number) for number in range(3)]
    most_bytes = adapters[0].size + adapters[1].size + 100
    files = store.files(most_bytes=most_bytes)

    def copies() -> set[str]:
        return {path.name for path in store.copies.iterdir()}

    first = await get(files, adapters[0], kept=[])
    await get(files, adapters[1], kept=[])
    store.weights(adapters[0]).unlink()
    assert await get(files, adapters[0], kept=[]) == first  # Without a download.
    await get(files, adapters[2], kept=[])
    assert copies() == {adapters[0].digest, adapters[2].digest}
    await get(files, adapters[1], kept=[adapters[0].digest])
    assert copies() == {adapters[0].digest, adapters[1].digest}
    with pytest.raises(StoreFailedError, match="is missing in the store"):
        await get(store.files(), AdapterRef("0" * 64, RANK, 10), kept=[])
    smaller = AdapterRef(adapters[2].digest, RANK, adapters[2].size - 1)
    with pytest.raises(WrongFilesError, match="larger than registered"):
        await get(files, smaller, kept=[])
    with pytest.raises(WrongFilesError, match="more than SLUICE_ADAPTER_FOLDER_BYTES"):
        await get(files, AdapterRef("0" * 64, RANK, most_bytes + 1), kept=[])
    assert copies() <= {each.digest for each in adapters}


async def test_worker_without_adapters_leaves_their_jobs(
    redis_server: RedisServer, gateway: Gateway, store: Store
) -> None:
    job: GenerationJob = make_job(adapter=store.add(0))
    async with running_worker(redis_server, Script(step_seconds=0.002)):
        plain = make_job(tenant="other")
        await gateway.enqueue(job)
        await gateway.enqueue(plain)
        await gateway.finished(plain)
        assert not gateway.deltas(job)


class SlowLoads(ScriptedEngine):
    """Makes no step while it loads an adapter, as vLLM does."""

    def __init__(self, folder: Path, script: Script) -> None:
        super().__init__(folder, script)
        self._turn = asyncio.Lock()

    @override
    async def load_adapter(self, adapter: EngineAdapter) -> None:
        async with self._turn:
            await asyncio.sleep(0.02)
            await super().load_adapter(adapter)

    @override
    async def step(self) -> EngineStep:
        async with self._turn:
            return await super().step()


async def test_other_worker_does_not_remove_files_before_they_are_loaded(
    redis_server: RedisServer, gateway: Gateway, store: Store
) -> None:
    adapters = [store.add(number) for number in range(3)]
    other = store.files(most_bytes=adapters[0].size + 100)

    class Overtaken(ScriptedEngine):
        @override
        async def load_adapter(self, adapter: EngineAdapter) -> None:
            await get(other, adapters[1], kept=[])
            await super().load_adapter(adapter)

    job = make_job(adapter=adapters[0])
    await gateway.enqueue(job)
    async with running_worker(
        redis_server, TWO_OF_THREE, engine_type=Overtaken, adapter_files=store.files()
    ):
        await gateway.finished(job)
    assert gateway.deltas(job)
    await get(other, adapters[2], kept=[])
    assert [path.name for path in store.copies.iterdir()] == [adapters[2].digest]


@pytest.mark.parametrize(("units", "least", "most"), [(0, 0.7, 2.5), (20_000, 3.0, 90.0)])
async def test_tenant_that_alternates_between_adapters_gets_fewer_turns(
    redis_server: RedisServer,
    gateway: Gateway,
    store: Store,
    units: int,
    least: float,
    most: float,
) -> None:
    # Two sequences in steps of 2 ms use 2000 service units in a second.
    script = Script(
        step_seconds=0.002,
        max_sequences=2,
        adapters=AdapterLimits(slots=1, loaded=1, max_rank=8, modules={}),
    )
    adapters = [store.add(number) for number in range(4)]
    thrashing = [
        make_job(tenant="thrash", adapter=adapters[number % 4], max_tokens=16)
        for number in range(40)
    ]
    steady = [make_job(tenant="steady", max_tokens=16) for _ in range(80)]
    for job in thrashing + steady:
        await gateway.enqueue(job)
    settings: dict[str, Any] = {"adapter_files": store.files(), "adapter_load_units": units}
    async with running_worker(redis_server, script, engine_type=SlowLoads, **settings):
        await gateway.read_until(lambda: len(gateway.ends()) >= 45)
        ended = gateway.ended_handles()
    turns = {
        name: sum(job.handle in ended for job in jobs)
        for name, jobs in (("steady", steady), ("thrash", thrashing))
    }
    assert least <= turns["steady"] / turns["thrash"] <= most, turns

"""Models and their workers, from the announcements of workers."""

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from contract import keys
from contract.messages import WorkerState
from gateway.models.catalogue import Catalogue
from gateway.platform.redis_client import MeasuredConnection
from gateway.records.errors import ModelLoadingError, ModelNotFoundError, NoWorkerError
from tests.support.fake_worker import FakeWorker


@pytest.fixture
def catalogue(redis: "Redis") -> Catalogue:
    """A catalogue before its first refresh."""
    return Catalogue(MeasuredConnection(redis))


async def test_model_without_announcement_is_unknown(catalogue: Catalogue, redis: "Redis") -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        await catalogue.find("nobody's")
    assert caught.value.message == (
        'The model "nobody\'s" does not exist or you do not have access to it.'
    )


async def test_loading_model_is_reported_as_loading(catalogue: Catalogue, redis: "Redis") -> None:
    await FakeWorker(redis, "loading").announce(WorkerState.LOADING)
    with pytest.raises(ModelLoadingError) as caught:
        await catalogue.find("loading")
    assert int(caught.value.headers()["retry-after"]) == 5


@pytest.mark.parametrize("state", [WorkerState.READY, WorkerState.DRAINING])
async def test_model_whose_worker_expired_has_no_worker(
    catalogue: Catalogue, redis: "Redis", state: WorkerState
) -> None:
    await FakeWorker(redis, "left").announce(state, ttl_ms=1)
    await asyncio.sleep(0.01)
    with pytest.raises(NoWorkerError) as caught:
        await catalogue.find("left")
    assert "retry-after" in caught.value.headers()


async def test_only_a_model_that_was_ready_once_is_found_while_it_sleeps(
    catalogue: Catalogue, redis: "Redis"
) -> None:
    await FakeWorker(redis, "asleep").announce(scales_to_zero=True, ttl_ms=1)
    await FakeWorker(redis, "first").announce(WorkerState.LOADING, scales_to_zero=True)
    await asyncio.sleep(0.01)
    found = await catalogue.find("asleep")
    assert (found.is_asleep, found.is_ready) == (True, False)
    with pytest.raises(ModelLoadingError):
        await catalogue.find("first")


async def test_model_with_a_worker_is_found(catalogue: Catalogue, redis: "Redis") -> None:
    await FakeWorker(redis, "here").announce()
    model = await catalogue.find("here")
    assert model.card.model == "here"
    assert model.status.ready_workers == 1
    assert [known.card.model for known in catalogue.models] == ["here"]


async def test_model_that_was_just_announced_is_found(catalogue: Catalogue, redis: "Redis") -> None:
    await catalogue.refresh()
    await FakeWorker(redis, "new").announce()
    assert (await catalogue.find("new")).card.model == "new"


async def test_model_whose_worker_just_came_back_is_found(
    catalogue: Catalogue, redis: "Redis"
) -> None:
    worker = FakeWorker(redis, "back")
    await worker.announce(ttl_ms=1)
    await asyncio.sleep(0.01)
    await catalogue.refresh()
    await worker.announce()
    assert (await catalogue.find("back")).status.ready_workers == 1


class Slow:
    """Holds the first cards that it reads until the test releases them."""

    def __init__(self, redis: "Redis") -> None:
        self._executor = MeasuredConnection(redis)
        self.has_read, self.may_return = asyncio.Event(), asyncio.Event()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        answer = await self._executor.execute_command(*args, **options)
        if args[0] == "HGETALL" and not self.has_read.is_set():
            self.has_read.set()
            await self.may_return.wait()
        return answer


async def test_outdated_refresh_hides_no_worker(redis: "Redis") -> None:
    slow = Slow(redis)
    catalogue = Catalogue(slow)
    overtaken = asyncio.create_task(catalogue.refresh())
    await slow.has_read.wait()
    await FakeWorker(redis, "new").announce()
    await catalogue.refresh()
    slow.may_return.set()
    await overtaken
    assert (await catalogue.find("new")).status.ready_workers == 1


async def test_model_is_served_only_with_the_card_of_a_ready_worker(redis: "Redis") -> None:
    worker, slow = FakeWorker(redis, "new"), Slow(redis)
    await worker.announce(WorkerState.LOADING)
    catalogue = Catalogue(slow)
    refresh = asyncio.create_task(catalogue.refresh())
    await slow.has_read.wait()
    # The gateway has a card without a tokenizer, and finds a worker that is ready.
    await worker.announce()
    slow.may_return.set()
    await refresh
    assert [model.status.ready_workers for model in catalogue.models] == [0]
    await catalogue.refresh()
    assert [model.status.ready_workers for model in catalogue.models] == [1]


async def test_unknown_models_cause_few_redis_reads(catalogue: Catalogue, redis: "Redis") -> None:
    await catalogue.refresh()
    before = (await redis.info("commandstats"))["cmdstat_hgetall"]["calls"]
    answers = await asyncio.gather(
        *(catalogue.find(f"guess {number}") for number in range(50)), return_exceptions=True
    )
    assert all(isinstance(answer, ModelNotFoundError) for answer in answers)
    after = (await redis.info("commandstats"))["cmdstat_hgetall"]["calls"]
    assert after - before == 1


async def test_unreadable_announcement_hides_no_other_model(
    catalogue: Catalogue, redis: "Redis"
) -> None:
    await redis.hset(keys.MODELS, "odd", b"\xc1 not msgpack")
    await FakeWorker(redis, "here").announce()
    assert (await catalogue.find("here")).card.model == "here"


async def test_model_stays_known_when_redis_is_restarted_empty(
    catalogue: Catalogue, redis: "Redis"
) -> None:
    await FakeWorker(redis, "here").announce()
    await catalogue.find("here")
    await redis.flushall()
    await catalogue.refresh()
    with pytest.raises(NoWorkerError):
        await catalogue.find("here")


async def test_removed_model_is_dropped_by_every_gateway(redis: "Redis") -> None:
    first, second = (Catalogue(MeasuredConnection(redis)) for _ in range(2))
    for name in ("gone", "stays"):
        await FakeWorker(redis, name).announce(WorkerState.DRAINING)
    for catalogue in (first, second):
        await catalogue.refresh()
    await first.remove("gone")
    for catalogue in (first, second):
        await catalogue.refresh()
        assert catalogue.names == {"stays"}
    with pytest.raises(ModelNotFoundError):
        await second.find("gone")
    # While it is loaded again, too.
    await FakeWorker(redis, "gone").announce(WorkerState.LOADING)
    with pytest.raises(ModelLoadingError):
        await second.find("gone")


async def test_model_stays_known_when_redis_is_emptied_after_another_was_removed(
    catalogue: Catalogue, redis: "Redis"
) -> None:
    for name in ("gone", "stays"):
        await FakeWorker(redis, name).announce(WorkerState.DRAINING)
    await catalogue.remove("gone")
    await catalogue.refresh()
    await redis.flushall()
    await catalogue.refresh()
    assert catalogue.names == {"stays"}

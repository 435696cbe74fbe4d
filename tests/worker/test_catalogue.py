"""The announcement of a worker."""

from typing import Any

import pytest
from redis.asyncio import Redis

from contract import keys, messages
from contract.messages import WorkerState
from contract.queue import JobQueue
from tests.worker.conftest import MODEL, MODEL_FOLDER
from worker.engine.base import EngineInfo
from worker.engine.scripted import Script, ScriptedEngine
from worker.queue.held import HeldDigests
from worker.registration import Registration
from worker.settings import WorkerSettings


@pytest.fixture
async def info() -> EngineInfo:
    """The properties of a started engine."""
    engine = ScriptedEngine(MODEL_FOLDER, Script(context_window=1_000))
    await engine.start()
    try:
        return engine.info
    finally:
        await engine.aclose()


@pytest.fixture
def catalogue(redis: Redis) -> Registration:
    queue = JobQueue(redis, MODEL)
    settings = WorkerSettings(
        model_path=str(MODEL_FOLDER), worker_id="w1", engine="scripted", context_window=1_000
    )
    return Registration(redis, queue, HeldDigests(queue, "w1"), settings)


def test_class_is_not_dropped_for_prefixes(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.queue.held.MOST_HELD", 3)
    held = HeldDigests(JobQueue(redis, MODEL), "w1")
    for name in (b"class", b"class-inexact"):
        held.keep(name)
        for number in range(5):
            held.add(b"%b %d" % (name, number))
        assert [*held._held] == [name, b"%b 3" % name, b"%b 4" % name]


async def announced_state(redis: Redis) -> WorkerState:
    stored: Any = await redis.get(keys.worker_card(MODEL, "w1"))
    card: Any = messages.decode_card(stored)
    assert card.context_window == 1_000
    return WorkerState(card.state)


async def test_worker_is_not_ready_before_its_files_are_published(
    catalogue: Registration, redis: Redis, info: EngineInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_model = redis.hsetnx

    async def starting(*args: Any) -> Any:
        catalogue.engine_started(info)
        return await note_model(*args)

    monkeypatch.setattr(redis, "hsetnx", starting)
    await catalogue.announce()
    reported = [(await announced_state(redis), catalogue.is_announced_ready)]
    await catalogue.announce()
    reported += [(await announced_state(redis), catalogue.is_announced_ready)]

    assert reported == [(WorkerState.LOADING, False), (WorkerState.READY, True)]
    assert info.chat is not None
    assert await redis.exists(keys.chat_template(info.chat.template_digest))


async def test_worker_whose_engine_dies_during_publication_is_not_ready(
    catalogue: Registration, redis: Redis, info: EngineInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue.engine_started(info)
    note_model = redis.hset

    async def dying(*args: Any) -> Any:
        catalogue.engine_failed("out of memory")
        return await note_model(*args)

    monkeypatch.setattr(redis, "hset", dying)
    await catalogue.announce()
    assert not catalogue.is_announced_ready
    await catalogue.announce()
    assert await announced_state(redis) is WorkerState.RESTARTING

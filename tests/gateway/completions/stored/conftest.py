"""Gateways without HTTP on one Redis, and a worker that a test controls."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.completions import settlement
from gateway.completions.stored import owned
from gateway.completions.stored import reader as reading
from tests.gateway.completions.stored.house import JOURNAL_SECONDS, MODEL, House
from tests.gateway.desk import hurry
from tests.support.fake_worker import FakeWorker
from tests.support.patience import PATIENCE_SECONDS

OpenHouse = Callable[..., Awaitable[House]]


@pytest.fixture
async def worker(redis: "Redis") -> FakeWorker:
    """A worker of the model that sends what a test gives it."""
    worker = FakeWorker(redis, MODEL)
    await worker.announce()
    return worker


@pytest.fixture
async def open_house(
    redis: "Redis", worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[OpenHouse]:
    """Makes gateways with short intervals, and ends their loops with the test."""
    hurry(monkeypatch)
    monkeypatch.setattr(reading, "REPEAT_SECONDS", 0.3)
    monkeypatch.setattr(settlement, "RECEIPT_PATIENCE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(owned, "FOLLOWED_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(owned, "UNWRITTEN_SECONDS", 4 * JOURNAL_SECONDS)
    houses: list[House] = []

    async def open_one(
        name: str, *, journal_seconds: float = JOURNAL_SECONDS, **options: Any
    ) -> House:
        house = House(redis, name, journal_seconds=journal_seconds, **options)
        houses.append(house)
        await house.open()
        return house

    yield open_one
    for house in houses:
        await house.close()


@pytest.fixture
async def first(open_house: OpenHouse) -> House:
    """The gateway that receives requests."""
    return await open_house("gw1")


@pytest.fixture
async def second(open_house: OpenHouse, first: House) -> House:
    """Another gateway."""
    return await open_house("gw2")

"""The price table in a gateway's memory."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from redis.asyncio import Redis

from common.tasks import end_task
from contract.tier import ServiceTier
from gateway.auth.authenticator import Authenticator
from gateway.auth.revocation import RevocationListener
from gateway.billing.prices import PriceService
from gateway.models.price_book import PriceBook
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database import table_copy
from gateway.platform.database.engine import Database
from gateway.records.errors import NotFoundError, StateConflictError, StoreUnavailableError
from gateway.records.times import utc_now
from tests.support.kinds import every_database
from tests.support.patience import PATIENCE_SECONDS
from tests.support.postgres_server import NOWHERE

DEFAULT, FLEX, PRIORITY = ServiceTier.DEFAULT, ServiceTier.FLEX, ServiceTier.PRIORITY
HOUR = timedelta(hours=1)


@pytest.fixture
def prices(database: Database, redis: Redis) -> PriceService:
    return PriceService(database, ChangeAnnouncer(redis))


@pytest.fixture
async def nowhere() -> AsyncIterator[Database]:
    """A database that cannot be reached."""
    database = Database(NOWHERE)
    yield database
    await database.aclose()


async def _until(book: PriceBook, prompt_micros: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            price = book.find("m", DEFAULT, utc_now())
            if price is not None and price.prompt_micros == prompt_micros:
                return
            await asyncio.sleep(0.01)


@every_database
async def test_price_depends_on_the_time(database: Database, prices: PriceService) -> None:
    before = utc_now() - HOUR
    first = await prices.add("m", prompt_micros=1, completion_micros=1)
    later = first.effective_at + HOUR
    second = await prices.add("m", prompt_micros=2, completion_micros=2, effective_at=later)
    corrected = await prices.add("m", prompt_micros=3, completion_micros=3, effective_at=later)
    book = PriceBook(database, batch_percent=50)
    await book.refresh()
    millisecond = timedelta(milliseconds=1)
    assert book.find("m", DEFAULT, before) is None
    assert book.find("m", DEFAULT, first.effective_at) == first
    assert book.find("m", DEFAULT, second.effective_at - millisecond) == first
    assert book.find("m", DEFAULT, second.effective_at) == corrected
    assert book.find("other", DEFAULT, later) is None
    assert book.in_force(["x", "m"], FLEX, before, later + HOUR) == [None, first, corrected]
    assert book.in_force(["m"], DEFAULT, first.effective_at, later) == [first]


@every_database
async def test_removed_price_applies_until_then_and_a_future_one_never(
    database: Database, prices: PriceService
) -> None:
    first = await prices.add("m", prompt_micros=1, completion_micros=1)
    later = first.effective_at + HOUR
    second = await prices.add("m", prompt_micros=2, completion_micros=2, effective_at=later)
    corrected = await prices.add("m", prompt_micros=3, completion_micros=3, effective_at=later)
    book = PriceBook(database, batch_percent=50)
    with pytest.raises(StateConflictError, match="a later one has replaced it"):
        await prices.remove(second.id)
    await prices.remove(corrected.id)
    removed = await prices.remove(first.id)
    with pytest.raises(StateConflictError, match="is removed already"):
        await prices.remove(first.id)
    with pytest.raises(NotFoundError, match="There is no price 99"):
        await prices.remove(99)
    await book.refresh()
    removed_at = removed.removed_at
    assert removed_at is not None
    assert book.find("m", DEFAULT, first.effective_at) == removed
    assert book.find("m", DEFAULT, removed_at) is None
    assert book.find("m", DEFAULT, later) == second
    assert book.in_force(["m"], FLEX, first.effective_at, later + HOUR) == [removed, None, second]
    assert await prices.list_current() == []
    again = await prices.add("m", prompt_micros=4, completion_micros=4)
    assert await prices.list_current() == [again]
    assert await prices.remove(again.id) in await prices.list_history("m")


async def test_tier_without_a_price_has_the_default_price(
    database: Database, prices: PriceService
) -> None:
    default = await prices.add("m", prompt_micros=10, completion_micros=10)
    flex = await prices.add(
        "m",
        prompt_micros=5,
        completion_micros=5,
        service_tier=FLEX,
        effective_at=utc_now() + HOUR,
    )
    book = PriceBook(database, batch_percent=50)
    await book.refresh()
    assert book.find("m", PRIORITY, utc_now()) == default
    assert book.find("m", FLEX, utc_now()) == default
    assert book.find("m", FLEX, flex.effective_at) == flex


async def test_unknown_prices_are_not_treated_as_zero(nowhere: Database) -> None:
    book = PriceBook(nowhere, batch_percent=50)
    with pytest.raises(StoreUnavailableError):
        await book.refresh()
    with pytest.raises(StoreUnavailableError, match="prices cannot be read") as caught:
        book.find("m", DEFAULT, utc_now())
    assert caught.value.headers()["retry-after-ms"] == "1000"


async def test_last_known_prices_apply_during_a_database_outage(
    database: Database, nowhere: Database, prices: PriceService, caplog: pytest.LogCaptureFixture
) -> None:
    price = await prices.add("m", prompt_micros=1, completion_micros=1)
    book = PriceBook(database, batch_percent=50)
    await book.refresh()
    book._database = nowhere
    task = asyncio.create_task(book.run())
    book.refresh_soon()
    # It has tried and failed, and does not try while it is closed.
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "the previous one remains in use" not in caplog.text:
            await asyncio.sleep(0.01)
    assert not task.done()
    assert book.find("m", DEFAULT, utc_now()) == price
    await end_task(task)


async def test_table_is_loaded_as_soon_as_the_database_is_back(
    database: Database,
    nowhere: Database,
    prices: PriceService,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(table_copy, "RETRY_SECONDS", 0.02)
    await prices.add("m", prompt_micros=7, completion_micros=1)
    book = PriceBook(nowhere, batch_percent=50)
    task = asyncio.create_task(book.run())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "cannot read the table" not in caplog.text:
            await asyncio.sleep(0.01)
    with pytest.raises(StoreUnavailableError):
        book.find("m", DEFAULT, utc_now())
    book._database = database
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not book._is_loaded:
            await asyncio.sleep(0.01)
    assert book.find("m", DEFAULT, utc_now()) is not None
    await end_task(task)


async def test_announced_price_applies_at_once(
    database: Database, prices: PriceService, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_copy, "REFRESH_SECONDS", 2 * PATIENCE_SECONDS)
    book = PriceBook(database, batch_percent=50)
    await book.refresh()
    authenticator = Authenticator(database, verifier=None, ttl_seconds=1, max_entries=1)
    lines_released = asyncio.Event()
    listener = RevocationListener(
        redis,
        authenticator,
        prices=book.refresh_soon,
        lines=lines_released.set,
    )
    listener.start()
    task = asyncio.create_task(book.run())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while listener._last_id is None:
            await asyncio.sleep(0.01)
    for prompt_micros in (1, 2):
        await prices.add("m", prompt_micros=prompt_micros, completion_micros=1)
        await _until(book, prompt_micros)
    # Idle gateways read the lines of batches when they are announced in the same stream.
    lines_released.clear()
    await ChangeAnnouncer(redis).lines_released()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await lines_released.wait()
    await end_task(task)
    await listener.stop()


async def test_unannounced_price_applies_after_a_while(
    database: Database, prices: PriceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_copy, "REFRESH_SECONDS", 0.05)
    book = PriceBook(database, batch_percent=50)
    task = asyncio.create_task(book.run())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not book._is_loaded:
            await asyncio.sleep(0.01)
    await prices.add("m", prompt_micros=4, completion_micros=1)
    await _until(book, 4)
    await end_task(task)

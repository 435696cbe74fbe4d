"""Prices: added, never changed, never for the past."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from contract.keys import KEY_EVENTS
from contract.tier import ServiceTier
from gateway.accounts.audit.log import AuditLog
from gateway.billing.prices import PriceService
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.records.errors import InvalidParameterError, StoreUnavailableError
from gateway.records.records import MAX_PRICE_MICROS
from gateway.records.times import utc_now
from tests.support.cases import all_cases
from tests.support.kinds import every_database

FLEX = ServiceTier.FLEX
HOUR = timedelta(hours=1)
BOTH = {"prompt_micros": 1, "completion_micros": 1}


@pytest.fixture
def prices(database: Database, redis: Redis) -> PriceService:
    return PriceService(database, ChangeAnnouncer(redis))


async def test_cached_tokens_cost_the_prompt_price_by_default(prices: PriceService) -> None:
    one = await prices.add("m", prompt_micros=150_000, completion_micros=600_000)
    assert (one.prompt_micros, one.cached_micros, one.completion_micros) == (
        150_000,
        150_000,
        600_000,
    )
    free = await prices.add("m", prompt_micros=5, cached_micros=0, completion_micros=0)
    assert free.cached_micros == 0
    assert await prices.list_history() == [one, free]


@every_database
async def test_current_prices_are_the_newest_in_force(prices: PriceService) -> None:
    await prices.add("m", prompt_micros=1, completion_micros=1)
    second = await prices.add("m", prompt_micros=2, completion_micros=2)
    future = await prices.add(
        "m", prompt_micros=3, completion_micros=3, effective_at=utc_now() + HOUR
    )
    flex = await prices.add("m", prompt_micros=0, completion_micros=0, service_tier=FLEX)
    other = await prices.add("a", prompt_micros=9, completion_micros=9)
    assert await prices.list_current() == [other, second, flex]
    assert await prices.list_current("m") == [second, flex]
    assert await prices.list_current("none") == []
    assert (await prices.list_history("m"))[-1] == future


async def test_price_is_announced_and_audited(
    prices: PriceService, database: Database, redis: Redis
) -> None:
    starts_at = utc_now() + HOUR
    await prices.add(
        "m", prompt_micros=2, completion_micros=1, effective_at=starts_at, actor="key:k"
    )
    entries: Any = await redis.xrange(KEY_EVENTS)
    assert [fields for _, fields in entries] == [{b"prices": b"all"}]
    async with database.reading() as transaction:
        (entry,) = await AuditLog(transaction).entries()
    assert (entry.action, entry.subject, entry.actor) == ("price.add", "m", "key:k")
    assert entry.details["prompt_micros"] == 2
    assert datetime.fromisoformat(entry.details["effective_at"]) == starts_at


@all_cases("model", ["", " ", "x" * 201, "a\0", "a\nb"])
async def test_wrong_model_is_refused(prices: PriceService, model: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        await prices.add(model, prompt_micros=1, completion_micros=1)
    assert caught.value.param == "model"


@all_cases(
    ("micros", "param"),
    [
        ({"prompt_micros": -1}, "prompt_micros"),
        ({"completion_micros": MAX_PRICE_MICROS + 1}, "completion_micros"),
        ({"cached_micros": -1}, "cached_micros"),
        ({"prompt_micros": 5, "cached_micros": 6}, "cached_micros"),
    ],
)
async def test_wrong_amount_is_refused_by_name(
    prices: PriceService, micros: dict[str, int], param: str
) -> None:
    with pytest.raises(InvalidParameterError, match=f"'{param}' must be") as caught:
        # Both have only amounts.
        await prices.add("m", **BOTH | micros)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert await prices.list_history() == []


@all_cases(
    "effective_at",
    [
        datetime(2020, 1, 1, tzinfo=UTC),
        datetime.max.replace(tzinfo=timezone(-HOUR)),
        datetime.min.replace(tzinfo=timezone(HOUR)),
    ],
    ids=["past", "after all time", "before all time"],
)
async def test_wrong_time_is_refused(prices: PriceService, effective_at: datetime) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        await prices.add("m", prompt_micros=1, completion_micros=1, effective_at=effective_at)
    assert caught.value.param == "effective_at"


@every_database
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE prices SET prompt_micros = 0",
        "DELETE FROM prices",
        "UPDATE price_removals SET price_id = 2",
        "DELETE FROM price_removals",
    ],
)
async def test_database_itself_keeps_the_history(
    prices: PriceService, database: Database, change: str
) -> None:
    added = await prices.add("m", prompt_micros=1, completion_micros=1)
    price = await prices.remove(added.id)
    with pytest.raises((DBAPIError, StoreUnavailableError)):
        async with database.writing() as transaction:
            await transaction.execute(text(change))
    assert await prices.list_history() == [price]

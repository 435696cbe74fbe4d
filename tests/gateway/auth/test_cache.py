"""The cache of the database, with a clock that the tests set."""

import asyncio
from dataclasses import dataclass

import pytest

from gateway.auth import cache as cache_module
from gateway.auth.cache import ABSENT_SECONDS, MAX_ABSENT, RETRY_SECONDS, STALE_SECONDS, LookupCache
from gateway.records.errors import StoreUnavailableError
from tests.support.patience import PATIENCE_SECONDS

TTL = 60.0


class Clock:
    """A monotonic clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Source:
    """The source of the cache; counts its loads."""

    value: str | None = "old"
    asked: int = 0
    is_down: bool = False
    gate: asyncio.Event | None = None

    async def load(self) -> str | None:
        self.asked += 1
        value = self.value
        if self.gate is not None:
            await self.gate.wait()
        if self.is_down:
            raise StoreUnavailableError("down")
        return value


async def _let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> LookupCache[str, str]:
    """Every result depends on the subject that it names."""
    return LookupCache(
        ttl_seconds=TTL, max_entries=3, subjects=lambda value: (value,), monotonic=clock
    )


Cache = LookupCache[str, str]


async def test_result_is_cached_for_its_time(cache: Cache, clock: Clock) -> None:
    source = Source()
    for _ in range(5):
        assert await cache.get("k", source.load) == "old"
    source.value = "new"
    clock.seconds += TTL - 0.001
    assert await cache.get("k", source.load) == "old"
    assert source.asked == 1
    clock.seconds += 0.001
    assert cache.fresh("k") is None
    assert await cache.get("k", source.load) == "new"
    assert source.asked == 2


async def test_absence_is_cached_briefly(cache: Cache, clock: Clock) -> None:
    source = Source(value=None)
    for _ in range(5):
        assert await cache.get("k", source.load) is None
    assert source.asked == 1
    source.value = "made"
    clock.seconds += ABSENT_SECONDS
    assert await cache.get("k", source.load) == "made"


async def test_vanished_result_is_dropped(cache: Cache, clock: Clock) -> None:
    source = Source()
    await cache.get("k", source.load)
    source.value = None
    clock.seconds += TTL
    assert await cache.get("k", source.load) is None
    assert len(cache) == 0


async def test_least_recently_used_leaves_first(cache: Cache) -> None:
    source = Source()
    for key in ("a", "b", "c"):
        await cache.get(key, source.load)
    cache.fresh("a")
    await cache.get("d", source.load)
    assert [cache.fresh(key) is not None for key in "abcd"] == [True, False, True, True]
    assert len(cache) == 3


async def test_absences_are_bounded(cache: Cache) -> None:
    source = Source(value=None)
    for number in range(MAX_ABSENT + 10):
        await cache.get(str(number), source.load)
    asked = source.asked
    await cache.get(str(MAX_ABSENT), source.load)
    assert source.asked == asked
    await cache.get("0", source.load)
    assert source.asked == asked + 1


async def test_misses_at_the_same_time_share_one_load(cache: Cache) -> None:
    source = Source(gate=asyncio.Event())
    waiting = [asyncio.create_task(cache.get("k", source.load)) for _ in range(50)]
    await _let_others_run()
    assert source.gate is not None
    source.gate.set()
    assert await asyncio.gather(*waiting) == ["old"] * 50
    assert source.asked == 1


async def test_cancelled_caller_does_not_end_the_load_of_others(cache: Cache) -> None:
    source = Source(gate=asyncio.Event())
    first, second = (asyncio.create_task(cache.get("k", source.load)) for _ in range(2))
    await _let_others_run()
    first.cancel()
    await _let_others_run()
    assert source.gate is not None
    source.gate.set()
    assert await second == "old"
    assert (first.cancelled(), source.asked) == (True, 1)


async def test_failure_without_earlier_result_is_raised_and_not_cached(cache: Cache) -> None:
    source = Source(is_down=True)
    with pytest.raises(StoreUnavailableError):
        await cache.get("k", source.load)
    source.is_down = False
    assert await cache.get("k", source.load) == "old"


async def test_stale_result_serves_while_the_source_is_down(cache: Cache, clock: Clock) -> None:
    source = Source()
    await cache.get("k", source.load)
    source.is_down = True
    clock.seconds += TTL
    assert await cache.get("k", source.load) == "old"
    assert await cache.get("k", source.load) == "old"
    assert source.asked == 2, "a source that has just failed is left alone for a moment"
    clock.seconds += RETRY_SECONDS
    assert await cache.get("k", source.load) == "old"
    assert source.asked == 3
    clock.seconds += STALE_SECONDS
    with pytest.raises(StoreUnavailableError):
        await cache.get("k", source.load)


async def test_stale_result_does_not_wait_long_for_a_silent_source(
    cache: Cache, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "REFRESH_PATIENCE_SECONDS", 0.05)
    source = Source()
    await cache.get("k", source.load)
    source.gate = asyncio.Event()
    clock.seconds += TTL
    async with asyncio.timeout(PATIENCE_SECONDS):
        # Its source returns nothing until afterwards.
        assert await cache.get("k", source.load) == "old"
    source.value = "new"
    source.gate.set()


async def test_dropped_subject_is_loaded_again(cache: Cache) -> None:
    source, other = Source(), Source(value="other")
    await cache.get("a", source.load)
    await cache.get("b", source.load)
    await cache.get("c", other.load)
    cache.drop("old")
    assert [cache.fresh(key) for key in "abc"] == [None, None, "other"]
    cache.drop("unknown")
    assert len(cache) == 1


async def test_dropped_result_does_not_serve_as_stale(cache: Cache) -> None:
    source = Source()
    await cache.get("k", source.load)
    cache.drop("old")
    source.is_down = True
    with pytest.raises(StoreUnavailableError):
        await cache.get("k", source.load)


async def test_change_during_a_load_keeps_its_result_out_of_the_cache(cache: Cache) -> None:
    source = Source(gate=asyncio.Event())
    early = asyncio.create_task(cache.get("k", source.load))
    await _let_others_run()
    cache.drop("old")
    assert await cache.get("k", Source(value="new").load) == "new", "does not join the earlier load"
    assert source.gate is not None
    source.gate.set()
    assert await early == "old"
    assert cache.fresh("k") == "new"


async def test_change_during_a_refresh_keeps_the_stale_result_from_serving(
    cache: Cache, clock: Clock
) -> None:
    source = Source()
    await cache.get("k", source.load)
    clock.seconds += TTL
    source.gate = asyncio.Event()
    source.is_down = True
    waiting = asyncio.create_task(cache.get("k", source.load))
    await _let_others_run()
    cache.drop("old")
    source.gate.set()
    with pytest.raises(StoreUnavailableError):
        await waiting


async def test_expired_results_are_refreshed_and_serve_during_an_outage(
    cache: Cache,
) -> None:
    source = Source()
    await cache.get("k", source.load)
    cache.expire_all()
    assert await cache.get("k", source.load) == "old"
    assert source.asked == 2
    cache.expire_all()
    source.is_down = True
    assert await cache.get("k", source.load) == "old"


async def test_subjects_of_dropped_results_are_deleted(cache: Cache) -> None:
    for number in range(10):
        await cache.get(str(number), Source(value=f"subject {number}").load)
    assert len(cache._by_subject) == len(cache) == 3

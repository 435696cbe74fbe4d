"""A gateway sends heartbeats, renews leases, and reports requests that block its loop."""

import asyncio
import ctypes
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from common.redis_url import blocking_redis_client
from contract import keys
from gateway.http.front import served
from gateway.limits.store import QuotaStore
from gateway.process import heartbeat
from gateway.process.heartbeat import Heartbeat
from tests.gateway.desk import GATEWAY, Desk
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer


class LeasesOfOne:
    """Stands for the reservations of a gateway, with one that Redis lacks."""

    def __init__(self) -> None:
        self.extended = threading.Event()
        self.restored = asyncio.Event()

    async def extend(self, store: QuotaStore) -> list[str]:
        unknown = await store.renew(1, ["r1"], owner="gw", lease_ms=60_000)
        self.extended.set()
        return unknown

    async def restore(self, unknown: list[str]) -> None:
        assert unknown == ["r1"]
        self.restored.set()


@pytest.fixture
def leases() -> LeasesOfOne:
    """The reservations of the gateway."""
    return LeasesOfOne()


@pytest.fixture
async def failures(
    desk: Desk, leases: LeasesOfOne, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[str]]:
    """The failures of a heartbeat thread with short intervals."""
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(heartbeat, "RENEW_SECONDS", 0.01)
    monkeypatch.setattr(heartbeat, "WATCH_SECONDS", 0.01)
    failures: list[str] = []
    reservations: Any = leases
    line = Heartbeat(
        redis_server.url,
        desk.dispatcher.presence,
        reservations,
        on_failure=lambda: failures.append("x"),
    )
    line.start()
    yield failures
    await line.aclose()
    assert not failures


def held_until(condition: Callable[[], bool], *, look_seconds: float = 0.001) -> None:
    """Hold the event loop until something has happened."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(look_seconds)


@pytest.fixture
def trimmed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when free memory is given back by a process that has grown."""
    trimmed = threading.Event()
    sizes = itertools.chain([0], itertools.repeat(heartbeat.TRIMMED_BYTES + 1))
    monkeypatch.setattr(heartbeat, "_resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(heartbeat, "TRIM_SECONDS", 0.01)
    library = SimpleNamespace(malloc_trim=lambda _: trimmed.set())
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    return trimmed


# The order of the fixtures is that in which they begin.
@pytest.mark.usefixtures("trimmed", "failures")
async def test_a_process_that_has_grown_gives_free_memory_back(trimmed: threading.Event) -> None:
    assert await asyncio.to_thread(trimmed.wait, PATIENCE_SECONDS)


@pytest.mark.usefixtures("failures")
async def test_requests_that_block_the_loop_stop_neither_heartbeats_nor_renewals(
    leases: LeasesOfOne, redis_server: RedisServer
) -> None:
    with blocking_redis_client(redis_server.url) as client:
        alive = keys.gateway_alive(GATEWAY)
        client.delete(alive)
        held_until(lambda: bool(client.exists(alive)))
    leases.extended.clear()
    held_until(leases.extended.is_set)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await leases.restored.wait()


@pytest.mark.usefixtures("failures")
async def test_dead_loop_sends_no_heartbeat(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "STUCK_SECONDS", 0.0)
    with blocking_redis_client(redis_server.url) as client:
        alive = keys.gateway_alive(GATEWAY)
        # Ten are due between two checks.
        held_until(lambda: not client.delete(alive), look_seconds=0.1)


@pytest.mark.usefixtures("failures")
async def test_requests_that_block_the_loop_are_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = asyncio.current_task()
    assert task is not None
    served[task] = {"route": SimpleNamespace(path="/v1/slow")}
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not holds("/v1/slow"):
                end = time.thread_time() + 5 * heartbeat.HELD_SECONDS
                while time.thread_time() < end:
                    pass
                await asyncio.sleep(0.01)
    finally:
        del served[task]
    assert any("by /v1/slow, in " in record.message for record in caplog.records)


def holds(route: str) -> float:
    """Return how often requests of a route were found blocking the loop."""
    return REGISTRY.get_sample_value("sluice_gateway_loop_holds_total", {"route": route}) or 0.0

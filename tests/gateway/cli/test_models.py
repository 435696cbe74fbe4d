"""The command that lists and removes models."""

import asyncio
import json
from collections.abc import Callable

import pytest
from click.testing import Result
from redis.asyncio import Redis

from contract.messages import WorkerState
from tests.support.fake_worker import FakeWorker
from tests.support.redis_server import RedisServer

Sluice = Callable[..., Result]


@pytest.fixture
def announced(redis_server: RedisServer) -> None:
    """A model with a worker, one without, and one whose worker is started for waiting jobs."""

    async def announce() -> None:
        async with Redis.from_url(redis_server.url) as redis:
            await redis.flushall()
            await FakeWorker(redis, "served").announce()
            asleep = FakeWorker(redis, "asleep")
            await asleep.announce(scales_to_zero=True, load_seconds=7, ttl_ms=1)
            await FakeWorker(redis, "gone").announce(WorkerState.DRAINING)

    asyncio.run(announce())


@pytest.mark.usefixtures("announced")
def test_models_are_listed_with_their_workers(sluice: Sluice) -> None:
    shown = sluice("models", "list")
    assert [line.split() for line in shown.output.splitlines()] == [
        ["MODEL", "ALIASES", "STATE", "WORKERS", "WAITING", "RUNNING"],
        ["asleep", "-", "sleeping", "0", "0", "0"],
        ["gone", "-", "no_worker", "0", "0", "0"],
        ["served", "-", "ready", "1", "0", "0"],
    ]
    reported = json.loads(sluice("models", "list", "--json").stdout)
    assert [each["model"] for each in reported] == ["asleep", "gone", "served"]
    assert [each["loading_seconds"] for each in reported] == [7, None, None]
    assert reported[2]["ready_workers"] == 1


@pytest.mark.usefixtures("announced")
def test_unserved_model_is_removed(sluice: Sluice) -> None:
    removed = sluice("models", "remove", "gone")
    assert removed.output == "Removed 'gone'. Gateways apply this within a second.\n"
    assert "gone" not in sluice("models", "list").output
    again = sluice("models", "remove", "gone")
    assert (again.exit_code, again.output) == (1, 'Error: There is no model "gone".\n')


@pytest.mark.usefixtures("announced")
def test_served_model_is_not_removed(sluice: Sluice) -> None:
    refused = sluice("models", "remove", "served")
    assert refused.exit_code == 1
    assert '"served" is in use: 1 workers serve it, 0 jobs wait and 0 run.' in refused.output
    assert "served" in sluice("models", "list").output

"""Deployments whose Redis becomes unavailable or fails over, and whose processes are restarted."""

from collections.abc import Iterator

import pytest

from tests.failures.outages.deployment import Deployment, deployed
from tests.support.redis_server import BUNDLED, SYSTEM, RedisServer
from tests.support.sentinels import WatchedRedis
from tests.support.stack import Stack, running_stack


@pytest.fixture(scope="package")
def plain_deployment() -> Iterator[Deployment]:
    """A deployment on one server."""
    with deployed(RedisServer(SYSTEM or BUNDLED, append="everysec")) as deployment:
        yield deployment


@pytest.fixture(scope="package", params=["bundled", pytest.param("system", marks=pytest.mark.long)])
def watched_stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A master and a replica of Redis 6.2 or 7, the former with passwords, and background jobs."""
    executable = BUNDLED if request.param == "bundled" else SYSTEM
    if executable is None:
        pytest.skip("redis-server is not installed")
    password = "s:e/c@t" if request.param == "bundled" else ""
    with running_stack(redis=WatchedRedis(executable, password=password)) as stack:
        stack.start_jobs()
        stack.start_beat()
        yield stack


@pytest.fixture
def watched(watched_stack: Stack) -> WatchedRedis:
    """The Redis of `watched_stack`."""
    redis = watched_stack.redis
    assert isinstance(redis, WatchedRedis)
    return redis

"""A deployment on one Redis, which is taken away, and whose processes are restarted."""

from collections.abc import Iterator

import pytest

from tests.outages.deployment import Deployment, deployed
from tests.support.redis_server import BUNDLED, SYSTEM, RedisServer


@pytest.fixture(scope="session")
def plain_deployment() -> Iterator[Deployment]:
    """A deployment on one server."""
    with deployed(RedisServer(SYSTEM or BUNDLED, append="everysec")) as deployment:
        yield deployment

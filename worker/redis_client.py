"""The worker's connections to Redis."""

from typing import Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from common.redis_url import redis_client, require_files

REDIS_TIMEOUT_SECONDS: Final = 5.0


def connect(url: str, *, timeout_seconds: float = REDIS_TIMEOUT_SECONDS) -> Redis:
    """Return a client that repeats no command: the worker decides what is tried again.

    Raises ValueError if a file that the URL names cannot be read.
    """
    require_files(url)
    return redis_client(
        url,
        socket_timeout=timeout_seconds,
        socket_connect_timeout=timeout_seconds,
        retry=Retry(NoBackoff(), 0),
    )

"""The worker's connections to Redis."""

from functools import partial
from typing import Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from common.redis_parts import connect_parts
from common.redis_url import redis_client
from contract.keys import Part, part_of

REDIS_TIMEOUT_SECONDS: Final = 5.0


def connect(
    url: str, *, replies_url: str | None = None, timeout_seconds: float = REDIS_TIMEOUT_SECONDS
) -> Redis:
    """Return a client that repeats no command: the worker decides what is tried again.

    `replies_url` is the Redis of replies, if that is another one.
    """
    connect_one = partial(
        redis_client,
        socket_timeout=timeout_seconds,
        socket_connect_timeout=timeout_seconds,
        retry=Retry(NoBackoff(), 0),
    )
    urls = dict.fromkeys(Part, url) | {Part.REPLIES: replies_url or url}
    return connect_parts(urls, connect_one, part_of, kind=Redis)

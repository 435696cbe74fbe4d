"""The worker's connections to Redis."""

from typing import Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from common.redis_parts import divided
from common.redis_url import redis_client
from contract.keys import Part, part_of

REDIS_TIMEOUT_SECONDS: Final = 5.0


def connect(
    url: str, *, replies_url: str | None = None, timeout_seconds: float = REDIS_TIMEOUT_SECONDS
) -> Redis:
    """Return a client that repeats no command: the worker decides what is tried again.

    `replies_url` is the Redis of replies, if that is another one.
    """
    client, *others = (
        redis_client(
            each,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(NoBackoff(), 0),
        )
        for each in dict.fromkeys((url, replies_url or url))
    )
    if not others:
        return client
    clients = dict.fromkeys(Part, client) | {Part.REPLIES: others[0]}
    return divided(clients, part_of, kind=Redis)

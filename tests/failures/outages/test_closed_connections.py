"""Redis closes a connection while a command is written to it."""

import asyncio
from typing import Any

import pytest
import uvloop
from redis.exceptions import RedisError

from common.redis_url import redis_client
from tests.support.redis_server import RedisServer
from tests.support.sentinels import WatchedRedis


async def write_to_a_closed_connection(url: str) -> None:
    """Send a command on a connection whose transport is closed, before the client notices."""
    async with redis_client(url) as client:
        pool: Any = client.connection_pool
        connection = await pool.get_connection()
        connection._writer.transport.abort()
        await asyncio.sleep(0)
        try:
            await connection.send_command("PING")
        finally:
            await pool.release(connection)


def test_command_on_a_closed_connection_raises_the_error_of_redis(
    redis_server: RedisServer,
) -> None:
    with pytest.raises(RedisError, match="closed already"):
        uvloop.run(write_to_a_closed_connection(redis_server.url))


def test_command_on_a_closed_connection_of_sentinel_raises_the_error_of_redis(
    watched: WatchedRedis,
) -> None:
    with pytest.raises(RedisError, match="closed already"):
        uvloop.run(write_to_a_closed_connection(watched.url))

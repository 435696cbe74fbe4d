"""A connection that Redis closes while a command is being written to it."""

import asyncio
from typing import Any

import pytest
import uvloop
from redis.exceptions import RedisError

from contract.redis_url import redis_client
from tests.support.redis_server import RedisServer
from tests.support.sentinels import WatchedRedis


async def write_to_a_closed_connection(url: str) -> None:
    """Send a command on a connection whose transport has gone, and nobody has noticed yet."""
    async with redis_client(url) as client:
        pool: Any = client.connection_pool
        connection = await pool.get_connection()
        connection._writer.transport.abort()
        await asyncio.sleep(0)
        try:
            await connection.send_command("PING")
        finally:
            await pool.release(connection)


def test_command_fails_as_redis_does_and_not_as_the_event_loop(redis_server: RedisServer) -> None:
    with pytest.raises(RedisError, match="closed already"):
        uvloop.run(write_to_a_closed_connection(redis_server.url))


def test_so_it_does_on_a_master_that_sentinels_know(watched: WatchedRedis) -> None:
    with pytest.raises(RedisError, match="closed already"):
        uvloop.run(write_to_a_closed_connection(watched.url))

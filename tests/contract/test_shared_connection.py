"""One connection for many tasks: when it stops, closes, or is closed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from time import perf_counter
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.redis_url import redis_client
from contract.scripts import executor as module
from contract.scripts.executor import SharedConnection
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import BUNDLED, RedisServer


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server that a test may stop."""
    server = RedisServer(BUNDLED)
    server.start()
    yield server
    server.close()


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator["Redis"]:
    async with redis_client(server.url, protocol=3) as client:
        await client.flushall()
        yield client


@pytest.fixture
def shared(client: "Redis") -> SharedConnection:
    """A connection whose commands never time out. Closing the client closes it."""
    return SharedConnection(client, timeout_seconds=2 * PATIENCE_SECONDS)


async def connections(client: "Redis") -> int:
    """Return the number of connections of the server, that of this command included."""
    info: Any = await client.info("clients")
    return int(info["connected_clients"])


async def until_blocked(client: "Redis") -> None:
    """Wait until a connection waits for a list."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (await client.info("clients"))["blocked_clients"]:
            await asyncio.sleep(0.01)


async def killed(client: "Redis") -> None:
    """Let the server close all connections but that of this command."""
    await client.client_kill_filter(_type="normal", skipme=True)


async def test_timed_out_command_is_not_repeated_and_later_ones_still_get_replies(
    server: RedisServer, client: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharedConnection(client, timeout_seconds=0.2)
    await shared.execute_command("SET", "n", 0)
    number = await shared.execute_command("CLIENT", "ID")
    server.freeze()
    first = shared.execute_command("INCR", "n")
    await asyncio.sleep(0)
    # All later commands have more time.
    monkeypatch.setattr(module, "perf_counter", lambda: perf_counter() + PATIENCE_SECONDS)
    second = shared.execute_command("INCR", "n")
    await asyncio.sleep(0)
    monkeypatch.setattr(module, "perf_counter", perf_counter)
    with pytest.raises(RedisTimeoutError):
        await first
    assert not second.done()
    shared._timeout_seconds = PATIENCE_SECONDS
    third = shared.execute_command("INCR", "n")
    await asyncio.sleep(0.1)
    assert not third.done()
    server.thaw()
    assert await second == 2
    assert await third == 3
    assert await shared.execute_command("CLIENT", "ID") != number
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await connections(client) > 2:
            await asyncio.sleep(0.01)
    await shared.aclose()


async def test_commands_that_wait_to_be_sent_time_out_together(
    server: RedisServer, client: "Redis"
) -> None:
    shared = SharedConnection(client, timeout_seconds=0.2)
    server.freeze()
    sent = []
    for _ in range(3):
        sent.append(shared.execute_command("PING"))
        await asyncio.sleep(0.05)
    async with asyncio.timeout(PATIENCE_SECONDS):
        ends = await asyncio.gather(*sent, return_exceptions=True)
    server.thaw()
    assert {type(end) for end in ends} == {RedisTimeoutError}


async def test_commands_fail_at_once_when_the_connection_is_closed(
    server: RedisServer, client: "Redis", shared: SharedConnection
) -> None:
    await shared.execute_command("SET", "a", 1)
    connecting = SharedConnection(client, timeout_seconds=2 * PATIENCE_SECONDS)
    server.freeze()
    sent = [each.execute_command("GET", "a") for each in (shared, connecting, shared)]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await shared.aclose()
        await connecting.aclose()
        ends = await asyncio.gather(*sent, return_exceptions=True)
    server.thaw()
    assert {type(end) for end in ends} == {RedisConnectionError}
    assert client.connection_pool._in_use_connections == set()


async def test_command_is_sent_again_once_if_the_connection_is_lost(
    client: "Redis", shared: SharedConnection
) -> None:
    popped = shared.execute_command("BLPOP", "list", 0)
    await until_blocked(client)
    await killed(client)
    await until_blocked(client)
    await client.rpush("list", "a")
    assert await popped == [b"list", b"a"]
    lost = shared.execute_command("BLPOP", "list", 0)
    for _ in range(2):
        await until_blocked(client)
        await killed(client)
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(RedisConnectionError):
            await lost
    assert await shared.execute_command("GET", "list-of-another") is None


async def test_abandoned_commands_and_messages_of_the_server_do_not_shift_replies(
    client: "Redis", shared: SharedConnection
) -> None:
    number = await shared.execute_command("CLIENT", "ID")
    await shared.execute_command("CLIENT", "TRACKING", "ON")
    await client.set("a", 1)
    assert await shared.execute_command("GET", "a") == b"1"
    await client.set("a", 2)
    abandoned = shared.execute_command("INCR", "n")
    await asyncio.sleep(0)
    abandoned.cancel()
    assert await shared.execute_command("GET", "a") == b"2"
    info = await shared.execute_command("INFO", "server")
    assert info["redis_version"]
    assert await shared.execute_command("GET", "n") == b"1"
    assert await shared.execute_command("CLIENT", "ID") == number


async def test_unconvertible_argument_fails_alone(shared: SharedConnection) -> None:
    with pytest.raises(TypeError):
        _ = shared.execute_command("SET", "a", None)
    assert await shared.execute_command("PING")


async def test_connection_that_has_ended_is_not_used(
    client: "Redis", shared: SharedConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect: Any = client.connection_pool.get_connection

    async def ended() -> Any:
        monkeypatch.undo()
        connection = await connect()
        # The server ends it after redis-py has checked it.
        connection._reader.feed_eof()
        return connection

    monkeypatch.setattr(client.connection_pool, "get_connection", ended)
    with pytest.raises(RedisConnectionError):
        await shared.execute_command("PING")
    assert await shared.execute_command("PING")

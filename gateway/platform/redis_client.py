"""Redis connections of the gateway and the background jobs, with metrics."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ClusterCrossSlotError,
    MovedError,
    NoScriptError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from typing_extensions import override

from common.metrics import UNKNOWN
from common.redis_cluster import slot_map_of
from common.redis_private import transport_of
from common.redis_url import address_of, describe, redis_client
from contract.scripts import LuaScript
from contract.scripts.cluster import ClusterConnection
from contract.scripts.cluster import shared_connection as shared
from contract.scripts.executor import SharedConnection
from gateway.platform import store_telemetry
from gateway.platform.store_errors import cause_of
from gateway.records.errors import StoreUnavailableError

CONNECT_TIMEOUT_SECONDS: Final = 1.0
COMMAND_TIMEOUT_SECONDS: Final = 5.0
SHARED_TIMEOUT_SECONDS: Final = 1.5
"""How long requests wait for Redis, including connecting and Sentinel lookups, before their 503."""

_WAITING_COMMANDS: Final = frozenset({"BLPOP", "XREAD"})
"""Blocking commands, whose duration does not reflect the speed of Redis."""
_PIPELINE: Final = "pipeline"
_REDIRECTIONS: Final[dict[type[Exception], str]] = {
    MovedError: "moved",
    AskError: "ask",
    TryAgainError: "try_again",
}


def connect(url: str, *, max_connections: int) -> "Redis":
    """Return a client that fails fast: a request gets a 503 at once instead of waiting for Redis.

    One retry covers the ordinary case that the server closed an idle pooled connection. Commands
    that time out are not retried.
    """
    has_tls = url.startswith("rediss:")
    return redis_client(
        url,
        kind=MeasuredRedis,
        redis_connect_func=_connect_and_record_certificate if has_tls else None,
        max_connections=max_connections,
        socket_connect_timeout=CONNECT_TIMEOUT_SECONDS,
        socket_timeout=COMMAND_TIMEOUT_SECONDS,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
    )


def server_name(client: "Redis") -> str:
    """Return the address of a server, or the sentinels' name of the master, for metrics."""
    pool: Any = client.connection_pool
    name: str = pool.service_name if isinstance(pool, SentinelConnectionPool) else address_of(pool)
    return name


@contextmanager
def converting_errors(client: "Redis") -> Iterator[None]:
    """Convert every error of Redis to StoreUnavailableError."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise StoreUnavailableError(
            "Redis cannot be reached at the moment.",
            detail=f"{describe(client)}: {cause_of(error)}.",
            retry_after_seconds=1.0,
        ) from error


async def observe_servers(client: "Redis", *, timeout_seconds: float) -> None:
    """Set the gauges of the server, or of each master of the cluster.

    Memory is unknown if a server does not respond. Servers that have no slots any more are dropped.
    """
    servers = {server_name(each): each for each in await _servers(client, timeout_seconds)}
    memory = await asyncio.gather(*(_memory(each, timeout_seconds) for each in servers.values()))
    # All at once: a scrape must not see a part of the servers.
    for gauge in (
        store_telemetry.REDIS_UP,
        store_telemetry.REDIS_USED_MEMORY,
        store_telemetry.REDIS_MAX_MEMORY,
    ):
        gauge.clear()
    for name, found in zip(servers, memory, strict=True):
        used, most = found or (UNKNOWN, UNKNOWN)
        store_telemetry.REDIS_UP.labels(name).set(found is not None)
        store_telemetry.REDIS_USED_MEMORY.labels(name).set(used)
        store_telemetry.REDIS_MAX_MEMORY.labels(name).set(most)


async def any_exists(client: "Redis", names: Sequence[str]) -> bool:
    """Return whether one of the keys exists, or may exist: a cluster is not asked.

    Raises RedisError.
    """
    if slot_map_of(client) is None:
        with suppress(ClusterCrossSlotError):
            return bool(await client.exists(*names))
    return True


async def _servers(client: "Redis", timeout_seconds: float) -> "list[Redis]":
    if (slots := slot_map_of(client)) is None:
        return [client]
    with suppress(RedisError, OSError):  # TimeoutError is an OSError.
        async with asyncio.timeout(timeout_seconds):
            await slots.ready()
    return [slots.client(address) for address in slots.masters or slots.seeds]


async def _memory(server: "Redis", timeout_seconds: float) -> tuple[int, int] | None:
    try:
        async with asyncio.timeout(timeout_seconds):
            return memory_of(await server.info("memory"))
    except (RedisError, OSError):  # TimeoutError is an OSError.
        return None


def memory_of(info: dict[str, int]) -> tuple[int, int]:
    """Return the used and the maximum memory of a server, from its `INFO memory`."""
    return info["used_memory"], info["maxmemory"] or info["total_system_memory"]


class MeasuredRedis(Redis):
    """Client that records the duration and failures of its commands and pipelines."""

    @cached_property
    def _server(self) -> str:
        return server_name(self)

    @override
    async def execute_command(self, *args: Any, **options: Any) -> Any:
        above: Any = super()
        began = time.perf_counter()
        try:
            reply = await above.execute_command(*args, **options)
        except Exception as error:
            _note_failure(self._server, _name_of(args), error)
            raise
        _note_reply(self._server, args, began)
        return reply

    @override
    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return _MeasuredPipeline(self, self._server, is_transaction=transaction)


class _MeasuredPipeline(Pipeline):
    def __init__(self, client: "Redis", server: str, *, is_transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, is_transaction, None)
        self._server = server

    @override
    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        began = time.perf_counter()
        try:
            replies = await super().execute(raise_on_error)
        except Exception as error:
            _note_failure(self._server, _PIPELINE, error)
            raise
        for reply in replies:
            if isinstance(reply, Exception):
                _note_failure(self._server, _PIPELINE, reply)
        seconds = time.perf_counter() - began
        store_telemetry.REDIS_SECONDS.labels(_PIPELINE, self._server).observe(seconds)
        return replies


class MeasuredConnection(SharedConnection):
    """A shared connection that fails fast and records the duration and failures of its commands."""

    def __init__(self, client: "Redis", *, timeout_seconds: float | None = None) -> None:
        super().__init__(client, timeout_seconds=timeout_seconds or SHARED_TIMEOUT_SECONDS)
        self._server = server_name(client)

    @override
    def replied(self, args: tuple[Any, ...], began: float) -> None:
        _note_reply(self._server, args, began)

    @override
    def failed(self, args: tuple[Any, ...], error: Exception) -> None:
        _note_failure(self._server, _name_of(args), error)


def shared_connection(
    client: "Redis", *, timeout_seconds: float | None = None
) -> SharedConnection | ClusterConnection:
    """Return a connection that all tasks share; one to each server if there are several."""
    return shared(client, partial(MeasuredConnection, timeout_seconds=timeout_seconds))


def _name_of(args: tuple[Any, ...]) -> str:
    """Return the metrics name of a command; for a script, the name of its file."""
    if args[0] == "EVALSHA":
        return LuaScript.names.get(args[1], "evalsha")
    return str(args[0]).lower()


def _note_reply(server: str, args: tuple[Any, ...], began: float) -> None:
    if args[0] not in _WAITING_COMMANDS:
        seconds = time.perf_counter() - began
        store_telemetry.REDIS_SECONDS.labels(_name_of(args), server).observe(seconds)


def _note_failure(server: str, command: str, error: Exception) -> None:
    if (kind := _REDIRECTIONS.get(type(error))) is not None:
        store_telemetry.REDIS_REDIRECTIONS.labels(server, kind).inc()
    # NOSCRIPT is the normal reply before a script is loaded.
    elif not isinstance(error, NoScriptError):
        store_telemetry.REDIS_ERRORS.labels(command, server).inc()


async def _connect_and_record_certificate(connection: Any) -> None:
    await connection.on_connect()
    encrypted = transport_of(connection).get_extra_info("ssl_object")
    if (certificate := encrypted.getpeercert(binary_form=True)) is not None:
        store_telemetry.certificate_shown("redis", certificate)

"""Redis connections, and an executor that lets requests share round trips, all with metrics."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from typing_extensions import override

from contract.metrics import UNKNOWN
from contract.redis_url import redis_client
from contract.scripts import LuaScript
from contract.tasks import end_task
from gateway import store_telemetry
from gateway.errors import StoreUnavailableError
from gateway.store_errors import cause_of

REDIS_PORT: Final = 6379
CONNECT_TIMEOUT_SECONDS: Final = 1.0
COMMAND_TIMEOUT_SECONDS: Final = 5.0
FLUSH_TIMEOUT_SECONDS: Final = 1.5
"""How long requests wait for Redis, including connecting and Sentinel lookups, before their 503."""
MOST_FLUSHES: Final = 8
"""Maximum concurrent pipelines, one connection each; while Redis pauses, further commands queue."""

_WAITING_COMMANDS: Final = frozenset({"BLPOP", "XREAD"})
"""Blocking commands, whose duration does not reflect the speed of Redis."""
_PIPELINE: Final = "pipeline"

_Command = tuple[tuple[Any, ...], asyncio.Future[Any]]
"""A command and the future for its reply."""


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


def describe(client: "Redis") -> str:
    """Return the address of the server, or of its sentinels, without a password."""
    pool: Any = client.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        sentinels = (_address(each.connection_pool) for each in pool.sentinel_manager.sentinels)
        return f"Redis {pool.service_name} of the sentinels {', '.join(sentinels)}"
    return f"Redis at {_address(pool)}"


def _address(pool: Any) -> str:
    return f"{pool.connection_kwargs['host']}:{pool.connection_kwargs.get('port', REDIS_PORT)}"


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


async def observe_memory(client: "Redis", *, timeout_seconds: float) -> None:
    """Query the used and maximum memory of Redis; both are unknown if Redis does not respond."""
    used = most = UNKNOWN
    try:
        async with asyncio.timeout(timeout_seconds):
            info: Any = await client.info("memory")
        used, most = info["used_memory"], info["maxmemory"] or info["total_system_memory"]
    except (RedisError, TimeoutError):
        pass
    store_telemetry.REDIS_USED_MEMORY.set(used)
    store_telemetry.REDIS_MAX_MEMORY.set(most)


class MeasuredRedis(Redis):
    """Client that records the duration and failures of its commands and pipelines."""

    @override
    async def execute_command(self, *args: Any, **options: Any) -> Any:
        above: Any = super()
        began = time.perf_counter()
        try:
            reply = await above.execute_command(*args, **options)
        except Exception as error:
            _note_failure(args, error)
            raise
        if args[0] not in _WAITING_COMMANDS:
            store_telemetry.redis_replied(_name_of(args), began)
        return reply

    @override
    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return _MeasuredPipeline(
            self.connection_pool, self.response_callbacks, transaction, shard_hint
        )


class _MeasuredPipeline(Pipeline):
    @override
    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        began = time.perf_counter()
        try:
            replies = await super().execute(raise_on_error)
        except Exception:
            store_telemetry.redis_failed(_PIPELINE)
            raise
        store_telemetry.redis_replied(_PIPELINE, began)
        return replies


class PipeliningExecutor:
    """Sends all commands issued in one iteration of the event loop as one pipeline.

    Under load many requests enqueue or cancel in the same iteration; sharing the round trip saves
    time in Redis and in the gateway. If Redis does not respond, a command fails after
    FLUSH_TIMEOUT_SECONDS, even if it was still waiting for others to be sent first.

    The executor keeps the connections that it took from the client's pool, and reads all replies
    of a pipeline under one timeout: redis-py's locks, events and timers for each of them take
    longer than the commands.
    """

    def __init__(self, client: "Redis") -> None:
        self._client = client
        self._pool: Any = client.connection_pool
        self._callbacks: Any = client.response_callbacks
        self._idle: list[Any] = []
        self._pending: list[_Command] = []
        self._flushes: set[asyncio.Task[None]] = set()
        self._is_scheduled = False

    async def execute_command(self, *args: Any, **_options: Any) -> Any:
        """Send one command and return its raw reply."""
        began = time.perf_counter()
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        self._pending.append((args, reply))
        self._schedule()
        try:
            value = await reply
        except Exception as error:
            _note_failure(args, error)
            raise
        store_telemetry.redis_replied(_name_of(args), began)
        return value

    async def aclose(self) -> None:
        """Fail pending commands, so that the client is unused and can be closed next."""
        pending, self._pending = self._pending, []
        self._fail(pending, RedisConnectionError("closed"))
        await end_task(*self._flushes)
        while self._idle:
            await self._pool.release(self._idle.pop())

    def _schedule(self) -> None:
        if self._pending and not self._is_scheduled and len(self._flushes) < MOST_FLUSHES:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_flush)

    def _start_flush(self) -> None:
        self._is_scheduled = False
        batch, self._pending = self._pending, []
        task = asyncio.ensure_future(self._flush(batch))
        self._flushes.add(task)
        task.add_done_callback(self._end_flush)

    def _end_flush(self, task: asyncio.Task[None]) -> None:
        self._flushes.discard(task)
        self._schedule()

    async def _flush(self, batch: list[_Command]) -> None:
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_SECONDS):
                replies = await self._exchange([args for args, _ in batch])
        except TimeoutError:
            error = RedisTimeoutError(f"no response within {FLUSH_TIMEOUT_SECONDS} s")
            replies = [error] * len(batch)
            # Commands that are not yet sent have waited just as long.
            pending, self._pending = self._pending, []
            self._fail(pending, error)
        except asyncio.CancelledError:
            self._fail(batch, RedisConnectionError("closed"))
            raise
        except Exception as error:  # Set as the result of every command.
            replies = [error] * len(batch)
        for (_, future), reply in zip(batch, replies, strict=True):
            if future.done():
                continue
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    async def _exchange(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Send commands on one connection. Return a reply or an error for each of them."""
        connection = self._idle.pop() if self._idle else await self._pool.get_connection()
        try:
            if _is_outdated(self._pool, connection):
                await connection.disconnect(nowait=True)
            replies: list[Any] = await connection.retry.call_with_retry(
                lambda: self._send_and_read(connection, commands),
                lambda _: connection.disconnect(nowait=True),
            )
        except BaseException:
            # Replies that were not read must not reach the next commands.
            await connection.disconnect(nowait=True)
            raise
        finally:
            self._idle.append(connection)
        return replies

    async def _send_and_read(self, connection: Any, commands: list[tuple[Any, ...]]) -> list[Any]:
        if not connection.is_connected:
            # Writing would connect too, but to the same server, without asking the sentinels.
            await connection.connect()
        await connection.send_packed_command(connection.pack_commands(commands))
        parser = connection._parser  # noqa: SLF001 - `read_response` sets a timer for each reply
        try:
            replies = [await parser.read_response() for _ in commands]
        except OSError as error:
            raise RedisConnectionError(f"error while reading: {error}") from error
        for number, (args, reply) in enumerate(zip(commands, replies, strict=True)):
            if isinstance(reply, ReadOnlyError):
                # The server is not master any more: the next pipeline asks the sentinels again.
                await connection.disconnect(nowait=True)
            elif args[0] in self._callbacks and not isinstance(reply, Exception):
                replies[number] = self._callbacks[args[0]](reply)
        return replies

    @staticmethod
    def _fail(commands: list[_Command], error: RedisError) -> None:
        for _, reply in commands:
            if not reply.done():
                reply.set_exception(error)


def _is_outdated(pool: Any, connection: Any) -> bool:
    """Return whether sentinels have promoted another server than that of the connection."""
    return (
        isinstance(pool, SentinelConnectionPool)
        and connection.is_connected
        and pool.master_address != (connection.host, connection.port)
    )


def _name_of(args: tuple[Any, ...]) -> str:
    """Return the metrics name of a command; for a script, the name of its file."""
    if args[0] == "EVALSHA":
        return LuaScript.names.get(args[1], "evalsha")
    return str(args[0]).lower()


def _note_failure(args: tuple[Any, ...], error: Exception) -> None:
    # NOSCRIPT is the normal reply before a script is loaded.
    if not isinstance(error, NoScriptError):
        store_telemetry.redis_failed(_name_of(args))


async def _connect_and_record_certificate(connection: Any) -> None:
    await connection.on_connect()
    encrypted = connection._writer.get_extra_info("ssl_object")  # noqa: SLF001 - no public API
    if (certificate := encrypted.getpeercert(binary_form=True)) is not None:
        store_telemetry.certificate_shown("redis", certificate)

"""One connection to Redis that all tasks of an event loop share, with implicit pipelining.

redis-py opens the connection: name resolution, TLS, authentication, database, and the master that
the sentinels report. Then its transport gets another protocol. redis-py takes a connection from a
pool for each command, and creates a timer and wakes a task for each reply.
"""

import asyncio
from collections import deque
from time import perf_counter
from typing import Any

import msgspec
from hiredis import PushNotification, Reader, pack_command
from redis.asyncio import Redis
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError
from typing_extensions import override

from common.redis_private import has_ended, to_error, transport_of
from common.tasks import end_task

_CLOSED = "Redis closed the connection"
_INCOMPLETE = object()


class _Command(msgspec.Struct):
    args: tuple[Any, ...]
    packed: bytes
    reply: asyncio.Future[Any]
    began: float
    """When it was issued, in `time.perf_counter`."""
    is_repeated: bool = False


class SharedConnection:
    """Sends all commands issued in one iteration of the event loop in one write.

    A command fails `timeout_seconds` after it was issued, which includes the time to connect. It is
    then not sent again. If the connection is lost, commands without a reply are sent once more.

    Replies arrive in the order of the commands. Commands that time out leave the connection: the
    next commands use a new one, and those that were sent already may still get their replies from
    the old one. So a command has no order with commands whose replies its caller did not await.
    """

    def __init__(self, client: "Redis", *, timeout_seconds: float) -> None:
        """Take connections from the pool of `client`. Closing the client closes them too."""
        self._pool: Any = client.connection_pool
        self._callbacks: dict[Any, Any] = dict(client.response_callbacks)
        self._timeout_seconds = timeout_seconds
        self._unsent: list[_Command] = []
        self._pipeline: _Pipeline | None = None
        self._pipelines: set[_Pipeline] = set()
        """All open pipelines: the current one, and those that only wait for replies."""
        self._connecting: asyncio.Task[None] | None = None

    def execute_command(self, *args: Any, **_options: Any) -> asyncio.Future[Any]:
        """Send one command. The future returns its reply, or raises RedisError or OSError."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        if not self._unsent:
            loop.call_soon(self._send)
        self._unsent.append(_Command(args, pack_command(args), reply, perf_counter()))
        return reply

    async def aclose(self) -> None:
        """Fail all commands without a reply, so that the client is unused and can be closed."""
        if self._connecting is not None:
            await end_task(self._connecting)
        self._fail_unsent(RedisConnectionError("closed"))
        for pipeline in list(self._pipelines):
            pipeline.fail(RedisConnectionError("closed"))
            await self._release(pipeline)

    def replied(self, args: tuple[Any, ...], began: float) -> None:
        """Note a reply, for measurements; `began` is in `time.perf_counter`."""

    def failed(self, args: tuple[Any, ...], error: Exception) -> None:
        """Note an error, for measurements."""

    def resolve(self, command: _Command, reply: Any) -> None:
        """Set the reply, or the error, of a command whose caller still waits."""
        args, future = command.args, command.reply
        if future.done():
            return
        if (callback := self._callbacks.get(args[0])) is not None:
            reply = _called(callback, reply)
        if isinstance(reply, Exception):
            self.failed(args, reply)
            future.set_exception(reply)
        else:
            self.replied(args, command.began)
            future.set_result(reply)

    def retire(self, pipeline: "_Pipeline") -> None:
        """Send no more commands on a pipeline."""
        if self._pipeline is pipeline:
            self._pipeline = None

    def lost(self, pipeline: "_Pipeline", commands: "deque[_Command]") -> None:
        """Send the commands of a closed pipeline again, except those that are already repeated."""
        self.retire(pipeline)
        error = RedisConnectionError(_CLOSED)
        again = []
        for command in commands:
            if command.is_repeated:
                self.resolve(command, error)
            elif not command.reply.done():
                command.is_repeated = True
                again.append(command)
        self._unsent[:0] = again
        self._send()

    def _send(self) -> None:
        pipeline = self._pipeline
        if not self._unsent or self._connecting is not None:
            return
        if pipeline is None or self._is_outdated(pipeline):
            self._pipeline = None
            self._connecting = asyncio.ensure_future(self._connect(self._unsent[0].began))
            return
        commands, self._unsent = self._unsent, []
        pipeline.send(commands)

    async def _connect(self, began: float) -> None:
        timeout_seconds = began + self._timeout_seconds - perf_counter()
        try:
            async with asyncio.timeout(timeout_seconds):
                for pipeline in [each for each in self._pipelines if each.is_closed]:
                    await self._release(pipeline)
                connection = await self._pool.get_connection()
            try:
                self._pipeline = _Pipeline(connection, self, self._timeout_seconds)
            except RedisConnectionError:
                await connection.disconnect(nowait=True)
                await self._pool.release(connection)
                raise
            self._pipelines.add(self._pipeline)
        except TimeoutError:
            # Commands that were issued later have waited for the same connection.
            self._fail_unsent(RedisTimeoutError(f"no response within {self._timeout_seconds} s"))
        except Exception as error:  # Set as the result of every command.
            self._fail_unsent(error)
        finally:
            self._connecting = None
        self._send()

    def _fail_unsent(self, error: Exception) -> None:
        commands, self._unsent = self._unsent, []
        for command in commands:
            self.resolve(command, error)

    def _is_outdated(self, pipeline: "_Pipeline") -> bool:
        """Return whether sentinels have promoted another server than that of the pipeline."""
        pool, connection = self._pool, pipeline.connection
        return isinstance(pool, SentinelConnectionPool) and pool.master_address != (
            connection.host,
            connection.port,
        )

    async def _release(self, pipeline: "_Pipeline") -> None:
        self._pipelines.discard(pipeline)
        await pipeline.connection.disconnect(nowait=True)
        await self._pool.release(pipeline.connection)


class _Pipeline(asyncio.Protocol):
    """One connection, and the commands that wait for replies on it."""

    def __init__(self, connection: Any, owner: SharedConnection, timeout_seconds: float) -> None:
        self.connection = connection
        self.is_closed = False
        self._owner = owner
        self._timeout_seconds = timeout_seconds
        self._waiting: deque[_Command] = deque()
        self._abandoned = 0
        """Commands before those that wait, which have timed out."""
        self._is_retired = False
        self._timer: asyncio.TimerHandle | None = None
        self._reader = Reader(
            protocolError=InvalidResponse,
            replyError=to_error,
            notEnoughData=_INCOMPLETE,
        )
        # An end that redis-py's protocol has received is not reported to the next protocol.
        if has_ended(connection):
            raise RedisConnectionError(_CLOSED)
        self._transport = transport_of(connection)
        # redis-py waits for the end of this protocol when it closes the connection.
        self._replaced = self._transport.get_protocol()
        self._transport.set_protocol(self)

    def send(self, commands: list[_Command]) -> None:
        """Write commands in one call."""
        self._waiting.extend(commands)
        if not self._transport.is_closing():
            self._transport.write(b"".join([command.packed for command in commands]))
        if self._timer is None:
            self._set_timer()

    def fail(self, error: Exception) -> None:
        """Fail all commands that wait."""
        while self._waiting:
            self._owner.resolve(self._waiting.popleft(), error)

    @override
    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self._waiting
        reader.feed(data)
        while (reply := reader.gets()) is not _INCOMPLETE:
            if type(reply) is PushNotification:
                continue
            if self._abandoned:
                self._abandoned -= 1
                continue
            self._owner.resolve(waiting.popleft(), reply)
            if isinstance(reply, ReadOnlyError):
                # The server is not master any more: a new connection asks the sentinels again.
                self._retire()
        if self._is_retired:
            self._retire()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._replaced.connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
        self._owner.lost(self, self._waiting)

    def _set_timer(self) -> None:
        seconds = self._waiting[0].began + self._timeout_seconds - perf_counter()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._timer = None
        issued_before = perf_counter() - self._timeout_seconds
        while self._waiting and self._waiting[0].began <= issued_before:
            self._abandoned += 1
            error = RedisTimeoutError(f"no response within {self._timeout_seconds} s")
            self._owner.resolve(self._waiting.popleft(), error)
        if self._waiting:
            self._set_timer()
        if self._abandoned:
            self._retire()

    def _retire(self) -> None:
        self._is_retired = True
        self._owner.retire(self)
        if not self._waiting:
            self._transport.abort()


def _called(callback: Any, reply: Any) -> Any:
    try:
        return reply if isinstance(reply, Exception) else callback(reply)
    except Exception as error:  # One reply that redis-py cannot convert must not end the others.
        return error

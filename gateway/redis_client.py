"""Connections to Redis, and the executor that lets requests share round trips."""

import asyncio
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from contract.redis_url import redis_client

CONNECT_TIMEOUT_SECONDS: Final = 1.0
COMMAND_TIMEOUT_SECONDS: Final = 5.0
FLUSH_TIMEOUT_SECONDS: Final = 1.5
"""How long requests wait for Redis before they get their 503: connecting, and asking Sentinel, included."""
MOST_FLUSHES: Final = 8
"""Pipelines on their way at once, each on a connection of its own; while Redis pauses, the rest gathers."""


def connect(url: str, *, max_connections: int) -> "Redis":
    """Return a client that fails fast: a request rather gets its 503 at once than waits for Redis.

    One retry covers the ordinary case of a pooled connection that the server closed while idle. What took
    too long is not tried again.
    """
    return redis_client(
        url,
        max_connections=max_connections,
        socket_connect_timeout=CONNECT_TIMEOUT_SECONDS,
        socket_timeout=COMMAND_TIMEOUT_SECONDS,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
    )


class PipeliningExecutor:
    """Sends all commands that are issued in one turn of the event loop as one pipeline.

    Under load many requests enqueue or cancel in the same turn; sharing the round trip costs Redis and
    the gateway a fraction of one each. While Redis does not answer, a command fails after
    FLUSH_TIMEOUT_SECONDS, also one that waited for others to be sent first.
    """

    def __init__(self, client: "Redis") -> None:
        self._client = client
        self._pending: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = []
        self._flushes: set[asyncio.Task[None]] = set()
        self._is_scheduled = False

    async def execute_command(self, *args: Any, **_options: Any) -> Any:
        """Send one command and return its raw reply."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        self._pending.append((args, reply))
        self._schedule()
        return await reply

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

    async def _flush(self, batch: list[tuple[tuple[Any, ...], asyncio.Future[Any]]]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for args, _ in batch:
            pipeline.execute_command(*args)
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_SECONDS):
                replies: list[Any] = await pipeline.execute(raise_on_error=False)
        except TimeoutError:
            error = RedisTimeoutError(f"no answer within {FLUSH_TIMEOUT_SECONDS} s")
            replies = [error] * len(batch)
            self._fail_pending(error)
        except Exception as error:  # noqa: BLE001 - handed to the callers, each of whom waits for it
            replies = [error] * len(batch)
        for (_, future), reply in zip(batch, replies, strict=True):
            if future.done():
                continue
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def _fail_pending(self, error: RedisTimeoutError) -> None:
        """Fail what was not sent yet: it has waited as long as what was."""
        pending, self._pending = self._pending, []
        for _, future in pending:
            if not future.done():
                future.set_exception(error)

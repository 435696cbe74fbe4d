"""Revocation: follow announcements of changed keys and tenants to invalidate caches at once."""

import asyncio
import logging
from collections.abc import Callable
from itertools import chain
from typing import Any, Final

from redis.asyncio import Redis

from common.tasks import Backoff, end_task, jittered
from contract import keys
from gateway.auth.authenticator import Authenticator

logger = logging.getLogger(__name__)

BLOCK_MS: Final = 2000
"""How long one read blocks; must stay below the connection's read timeout."""
MAX_BATCH: Final = 1000
FIRST_RETRY_SECONDS: Final = 0.1
LAST_RETRY_SECONDS: Final = 5.0

_BEFORE_ALL = b"0-0"


class RevocationListener:
    """A task that reads the stream of changes after the last entry it has read.

    Args:
        redis: a client that returns bytes; the blocking read occupies one of its connections.
        authenticator: its cache is invalidated.
        on_change: functions to call when something has changed, or may have changed, by the field
            of its announcements, such as `prices`.
    """

    def __init__(
        self,
        redis: Redis,
        authenticator: Authenticator,
        **on_change: Callable[[], None],
    ) -> None:
        self._redis = redis
        self._authenticator = authenticator
        self._on_change = on_change
        self._last_id: bytes | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the listener; Redis need not be reachable yet."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop the listener."""
        task, self._task = self._task, None
        if task is not None:
            await end_task(task)

    async def _run(self) -> None:
        backoff = Backoff(FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS)
        while True:
            try:
                await self._find_place()
                backoff.reset()
                await self._follow()
            except Exception as error:  # Else revoked keys would stay valid.
                retry_seconds = backoff.next_seconds()
                logger.warning(
                    "cannot read revocations, retrying in about %.1f s: %s",
                    retry_seconds,
                    type(error).__name__,
                )
                # Gateways that lose the same Redis must not all reconnect at the same moment.
                await asyncio.sleep(jittered(retry_seconds, least=0.5))

    async def _find_place(self) -> None:
        """Check that no entry was missed since the last one read; otherwise expire the cache.

        Entries leave the stream oldest first, so if the last one read still exists, every later one
        does.
        """
        last = self._last_id
        if last is not None and await self._redis.xrange(keys.KEY_EVENTS, last, last, count=1):
            return
        newest: Any = await self._redis.xrevrange(keys.KEY_EVENTS, count=1)
        self._last_id = newest[0][0] if newest else _BEFORE_ALL
        self._authenticator.expire_all()
        for changed in self._on_change.values():
            changed()

    async def _follow(self) -> None:
        while True:
            reply: Any = await self._redis.xread(
                {keys.KEY_EVENTS: self._last_id or _BEFORE_ALL}, count=MAX_BATCH, block=BLOCK_MS
            )
            for event_id, fields in chain.from_iterable(entries for _, entries in reply or ()):
                self._apply(fields)
                self._last_id = event_id

    def _apply(self, fields: dict[bytes, bytes]) -> None:
        if (key_id := fields.get(b"key")) is not None:
            self._authenticator.drop_key(key_id.decode("utf-8", "replace"))
        if (tenant_id := fields.get(b"tenant")) is not None:
            self._authenticator.drop_tenant(tenant_id.decode("utf-8", "replace"))
        if b"all" in fields:
            self._authenticator.expire_all()
        for name, changed in self._on_change.items():
            if name.encode() in fields:
                changed()

"""Background answers: find those whose owner is dead, because a client may never request them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from redis.exceptions import RedisError

from contract import keys
from contract.scripts import CommandExecutor
from gateway.concurrency.tasks import in_background, raise_if_cancelled

WATCH_SECONDS: Final = 3.0
"""How often dead gateways are looked for, and this gateway's background answers are registered."""
KEPT_SECONDS: Final = 172_800
"""How long the registered answers of a gateway are kept."""

logger = logging.getLogger(__name__)


class BackgroundWatch:
    """The background answers of one gateway process, and a watch on those of other gateways."""

    def __init__(
        self,
        executor: CommandExecutor,
        gateway: str,
        *,
        is_alive: Callable[[str], Awaitable[bool]],
        go_on: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._execute = executor.execute_command
        self._gateway = gateway
        self._is_alive = is_alive
        self._go_on = go_on
        self._own: set[str] = set()

    def note(self, request_id: str) -> None:
        """Register a background answer that this gateway owns."""
        self._own.add(request_id)
        in_background(self._tell([request_id]))

    def forget(self, request_id: str) -> None:
        """Unregister an answer."""
        if request_id in self._own:
            self._own.discard(request_id)
            in_background(self._forget(self._gateway, request_id))

    async def run(self) -> None:
        """Take over the background answers of dead gateways until cancelled."""
        while True:
            await self._tell(self._own)
            try:
                await self.look()
            except RedisError as error:
                logger.warning("cannot look for other gateways: %s", type(error).__name__)
            raise_if_cancelled()
            await asyncio.sleep(WATCH_SECONDS)

    async def look(self) -> None:
        """Take over the background answers of dead gateways. Raises RedisError."""
        owners = await self._execute("SMEMBERS", keys.BACKGROUND_OWNERS)
        for owner in sorted(name.decode() for name in owners):
            if owner != self._gateway and not await self._is_alive(owner):
                await self._inherit(owner)

    async def _inherit(self, owner: str) -> None:
        key = keys.background_responses(owner)
        for request_id in sorted(name.decode() for name in await self._execute("SMEMBERS", key)):
            if await self._go_on(request_id):
                await self._forget(owner, request_id)
        if not await self._execute("EXISTS", key):
            await self._execute("SREM", keys.BACKGROUND_OWNERS, owner)

    async def _tell(self, request_ids: Collection[str]) -> None:
        """Register this gateway's answers. Called repeatedly, because Redis may have lost them."""
        if not request_ids:
            return
        key = keys.background_responses(self._gateway)
        try:
            await asyncio.gather(
                self._execute("SADD", key, *request_ids),
                self._execute("EXPIRE", key, KEPT_SECONDS),
                self._execute("SADD", keys.BACKGROUND_OWNERS, self._gateway),
            )
        except RedisError as error:
            logger.warning("cannot tell of background answers now: %s", type(error).__name__)

    async def _forget(self, owner: str, request_id: str) -> None:
        try:
            await self._execute("SREM", keys.background_responses(owner), request_id)
        except RedisError as error:
            logger.warning("cannot forget a background answer now: %s", type(error).__name__)

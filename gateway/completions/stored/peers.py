"""Other gateways: whether they are alive, and notices to them about responses."""

import asyncio
import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from common.tasks import TaskSet, in_background, tolerating_outage
from contract import keys
from contract.messages import ResponseGrown
from contract.scripts import CommandExecutor
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.completions.queue.notices import send_notices


@dataclass(eq=False)
class Peers:
    """Sends and receives notices that a response has grown, and sends all other notices."""

    _executor: CommandExecutor
    _dispatcher: Dispatcher
    _tasks: TaskSet

    def __post_init__(self) -> None:
        self._handles = itertools.count(1)
        self._readers: dict[int, asyncio.Event] = {}

    def add_reader(self, grown: asyncio.Event) -> int:
        """Return the handle of a reader here, whose event is set when its response has grown."""
        handle = next(self._handles)
        self._readers[handle] = grown
        return handle

    def remove_reader(self, handle: int) -> None:
        """Remove a reader that was closed."""
        self._readers.pop(handle, None)

    def notify_reader(self, gateway: str, handle: int) -> None:
        """Notify a reader of any gateway that its response has grown."""
        if gateway != self._dispatcher.gateway:
            self.send(gateway, grown=[ResponseGrown(handle)])
        elif (grown := self._readers.get(handle)) is not None:
            grown.set()

    def send(self, gateway: str, **notices: Any) -> None:
        """Send notices to another gateway. Lost notices are requested or sent again."""
        self._tasks.start(self._send(gateway, notices))

    async def is_alive(self, gateway: str) -> bool:
        """Whether another gateway is alive, or may be as far as is known. Raises RedisError."""
        dispatcher = self._dispatcher
        if gateway == dispatcher.gateway:
            return False  # This gateway would list the response in `OwnedResponses`.
        return await dispatcher.presence.is_alive(gateway, self._executor)

    async def _send(self, gateway: str, notices: dict[str, Any]) -> None:
        with tolerating_outage(f"notify gateway {gateway}"):
            await send_notices(self._executor, gateway, sender=self._dispatcher.gateway, **notices)


INDEX_SECONDS: Final = 172_800
"""Lifetime of a gateway's index after its last refresh."""


class BackgroundIndex:
    """The running background responses of each gateway. Only this gateway adds its own.

    The index is in Redis: a client may never request a response whose owner has died.
    """

    def __init__(self, executor: CommandExecutor, gateway: str) -> None:
        self._execute = executor.execute_command
        self._gateway = gateway
        self._own: set[str] = set()

    def add(self, tenant_id: str, request_id: str) -> None:
        """Add a response of this gateway."""
        entry = f"{tenant_id} {request_id}"
        self._own.add(entry)
        in_background(self._add([entry]))

    def remove(self, tenant_id: str, request_id: str) -> None:
        """Remove a response of this gateway. Does nothing for other responses."""
        entry = f"{tenant_id} {request_id}"
        if entry in self._own:
            self._own.discard(entry)
            in_background(self.remove_of(self._gateway, tenant_id, request_id))

    async def refresh(self) -> None:
        """Add all responses of this gateway again, because Redis may have lost them."""
        await self._add(self._own)

    async def other_owners(self) -> list[str]:
        """Return the other gateways that have background responses. Raises RedisError."""
        return [
            name for name in await self._members(keys.BACKGROUND_OWNERS) if name != self._gateway
        ]

    async def responses_of(self, owner: str) -> list[tuple[str, str]]:
        """Return the tenants and request ids of an owner's responses. Raises RedisError."""
        entries = await self._members(keys.background_responses(owner))
        found = (each.rpartition(" ") for each in entries)
        return [(tenant_id, request_id) for tenant_id, _, request_id in found]

    async def remove_of(self, owner: str, tenant_id: str, request_id: str) -> None:
        """Remove a response of any gateway."""
        with tolerating_outage("unregister a background response"):
            entry = f"{tenant_id} {request_id}"
            await self._execute("SREM", keys.background_responses(owner), entry)

    async def remove_owner(self, owner: str) -> None:
        """Remove an owner unless it still has responses. Raises RedisError."""
        if not await self._execute("EXISTS", keys.background_responses(owner)):
            await self._execute("SREM", keys.BACKGROUND_OWNERS, owner)

    async def _members(self, key: str) -> list[str]:
        names: Any = await self._execute("SMEMBERS", key)
        return sorted(name.decode() for name in names)

    async def _add(self, entries: Collection[str]) -> None:
        if not entries:
            return
        key = keys.background_responses(self._gateway)
        with tolerating_outage("register background responses"):
            await asyncio.gather(
                self._execute("SADD", key, *entries),
                self._execute("EXPIRE", key, INDEX_SECONDS),
                self._execute("SADD", keys.BACKGROUND_OWNERS, self._gateway),
            )

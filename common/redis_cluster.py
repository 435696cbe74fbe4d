"""Redis Cluster: the servers, their slots, and a client that sends each command to its server.

redis-py's cluster client closes the connections of all running commands whenever a slot moves or a
master fails, and sends commands again that have timed out. Sluice needs neither. This client is
redis-py's client of one server for each master, with the errors that it has without a cluster.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from time import monotonic
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from typing_extensions import override

from common.tasks import end_task

ASKING: Final = "ASKING"
MOST_REDIRECTIONS: Final = 16
"""Servers that a command is sent to before it fails: servers that disagree must not loop."""
MOST_PAUSES_SECONDS: Final = 1.0
"""How long a command waits for slots that move or have no server."""
_PAUSE_SECONDS: Final = 0.05
_REFRESH_SECONDS: Final = 0.1
"""Minimum time between two refreshes."""
_KEYLESS: Final = frozenset(
    {"ACL", "CLUSTER", "CONFIG", "INFO", "PING", "PUBSUB", "SCRIPT", "TIME"}
)
_SCRIPTS: Final = frozenset({"EVAL", "EVALSHA"})
_STREAMS: Final = ("STREAMS", b"STREAMS")
ABSENT: Final = "}:absent"
"""End of a key that never exists, the last one of each script. `contract.scripts` removes it."""

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Redirection:
    """Where and when to send a command again."""

    address: Address | None = None
    """None: the server that has the slot then."""
    is_asking: bool = False
    """Whether `ASKING` must precede the command, because the slot is being moved."""
    pause_seconds: float = 0.0
    is_lost: bool = False
    """Whether the server is gone: only another one that has the slot gets the command."""


class SlotMap:
    """Which server has which slot, and a client of each server.

    Its tasks end with `aclose`.
    """

    def __init__(self, seeds: Sequence[Address], client_of: Callable[[Address], "Redis"]) -> None:
        """Ask `seeds` for the first map. `client_of` creates the client of a server."""
        self._seeds = tuple(seeds)
        self._client_of = client_of
        self._owners: list[Address] = []
        """Address of the master of each slot; empty before the first refresh."""
        self._clients: dict[Address, Redis] = {}
        self._refresh: asyncio.Task[None] | None = None
        self._refreshed_at = float("-inf")

    @property
    def seeds(self) -> Sequence[Address]:
        """The servers that the URL names."""
        return self._seeds

    @property
    def masters(self) -> list[Address]:
        """The servers that have slots; empty before the first refresh."""
        return sorted(set(self._owners))

    def owner(self, slot: int) -> Address:
        """Return the master of a slot, after `ready`."""
        return self._owners[slot]

    def client(self, address: Address) -> "Redis":
        """Return the client of a server."""
        if address not in self._clients:
            self._clients[address] = self._client_of(address)
        return self._clients[address]

    async def ready(self) -> None:
        """Wait for the first refresh. Raises RedisError or OSError if no server responds."""
        if not self._owners:
            await asyncio.shield(self._refreshing())

    def refresh_soon(self) -> None:
        """Start to read the map again, unless a refresh is running."""
        _ = self._refreshing()

    def redirection(self, error: BaseException) -> Redirection | None:
        """Return what to do after an error, or None if the command has failed.

        The map is updated, too.
        """
        if isinstance(error, MovedError):
            address = (error.host, error.port)
            if self._owners:
                self._owners[error.slot_id] = address
            # Slots move together, and a promoted server has all of its master.
            self.refresh_soon()
            return Redirection(address)
        if isinstance(error, AskError):
            return Redirection((error.host, error.port), is_asking=True)
        if isinstance(error, TryAgainError):
            return Redirection(pause_seconds=_PAUSE_SECONDS)
        if isinstance(error, ClusterDownError):
            self.refresh_soon()
            return Redirection(pause_seconds=_PAUSE_SECONDS)
        if isinstance(error, RedisConnectionError):
            self.refresh_soon()
            return Redirection(is_lost=True)
        return None

    async def is_replaced(self, slot: int, address: Address) -> bool:
        """Read the map again. Return whether another server than this one has the slot."""
        try:
            await asyncio.wait_for(asyncio.shield(self._refreshing()), MOST_PAUSES_SECONDS)
        except (RedisError, OSError):
            return False
        return self._owners[slot] != address

    async def aclose(self) -> None:
        """Close the clients of all servers."""
        if self._refresh is not None:
            await end_task(self._refresh)
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()

    def _refreshing(self) -> asyncio.Task[None]:
        """Return the refresh that is running, which all callers share, or a new one."""
        if self._refresh is None or self._refresh.done():
            self._refresh = asyncio.create_task(self._read())
            # Commands see the error of the server that they need.
            self._refresh.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._refresh

    async def _read(self) -> None:
        await asyncio.sleep(max(self._refreshed_at + _REFRESH_SECONDS - monotonic(), 0))
        last_error: RedisError | OSError = RedisConnectionError("the URL names no server")
        for address in dict.fromkeys([*self.masters, *self._seeds]):
            try:
                # Each of several servers that cannot be reached would take a timeout of its own.
                async with asyncio.timeout(MOST_PAUSES_SECONDS):
                    ranges = await self.client(address).execute_command("CLUSTER", "SLOTS")
                before, self._owners = self.masters, _owners(ranges, address)
            except TimeoutError:
                last_error = RedisTimeoutError(f"{address[0]}:{address[1]} did not respond in time")
                continue
            except (RedisError, OSError) as error:
                last_error = error
                continue
            self._refreshed_at = monotonic()
            for former in ({*before} - {*self.masters}) & self._clients.keys():
                # The replies to running commands still come.
                pool = self._clients[former].connection_pool
                await pool.disconnect(inuse_connections=False)
            return
        raise last_error


def _owners(ranges: Sequence[Any], asked: Address) -> list[Address]:
    """Return the master of each slot. Raises ClusterDownError if a slot has none."""
    owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for first, last, (host, port, *_), *_ in ranges:
        # A server that does not know its own address names none.
        address = (_text(host) or asked[0], int(port))
        owners[first : last + 1] = [address] * (last + 1 - first)
    found = [each for each in owners if each is not None]
    if len(found) < len(owners):
        raise ClusterDownError(f"{len(owners) - len(found)} slots have no server")
    return found


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


def slot_of(args: Sequence[Any]) -> int:
    """Return the slot of a command's first key; for a command without a key, any."""
    name = args[0]
    if name in _KEYLESS or (name in _SCRIPTS and not int(args[2])):
        return 0
    at = 3 if name in _SCRIPTS else 1
    if name == "XREAD":
        at += next(at for at, each in enumerate(args) if each in _STREAMS)
    return slot_of_key(args[at])


def slot_of_key(key: str | bytes) -> int:
    """Return the slot of a key, which its hash tag decides if it has one."""
    return key_slot(key if isinstance(key, bytes) else key.encode())


def with_absent_key(args: Sequence[Any]) -> Sequence[Any]:
    """Return a script's command with one more key, so that it never runs in a slot that moves.

    A script uses keys that it does not name. In a slot that is being moved, some of them are on
    another server: the script would fail in its middle, or take them for missing. Redis only checks
    the named keys: it redirects the command if one of them is missing.
    """
    if args[0] not in _SCRIPTS or not int(args[2]):
        return args
    key, end = args[3], 3 + int(args[2])
    name = key.decode() if isinstance(key, bytes) else key
    tag = name[1 : name.index("}")] if name.startswith("{") else name
    return (*args[:2], end - 2, *args[3:end], f"{{{tag}{ABSENT}", *args[end:])


async def redirected(
    slots: SlotMap, args: Sequence[Any], send: Callable[[Address, Redirection], Awaitable[Any]]
) -> Any:
    """Send a command to the server of its first key, and follow redirections.

    `send` gets the server, and the redirection to it. A script waits until its slot has moved.
    """
    slot, again, redirections = slot_of(args), Redirection(), 0
    until = monotonic() + MOST_PAUSES_SECONDS
    while True:
        if again.address is None:
            await slots.ready()
        address = again.address or slots.owner(slot)
        try:
            return await send(address, again)
        except RedisError as error:
            found = slots.redirection(error)
            if found is None:
                raise
            if found.is_asking and args[0] in _SCRIPTS:
                found = Redirection(pause_seconds=_PAUSE_SECONDS)
            is_enough = redirections == MOST_REDIRECTIONS
            if monotonic() > until if found.pause_seconds else is_enough:
                raise
            if found.is_lost and not await slots.is_replaced(slot, address):
                raise
            redirections += not found.pause_seconds
            again = found
        await asyncio.sleep(again.pause_seconds)


class ClusterClient:
    """Mixed into a class of client, makes it send each command to the server of its first key.

    A command without a key goes to any master. `redis_client` sets the slot map.
    """

    slot_map: SlotMap

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command, and follow redirections."""
        args = tuple(with_absent_key(args))

        def send(address: Address, again: Redirection) -> Awaitable[Any]:
            client = self.slot_map.client(address)
            if again.is_asking:
                return _asking(client, args, options)
            return client.execute_command(*args, **options)

        return await redirected(self.slot_map, args, send)

    def pipeline(self, *, transaction: bool = True) -> Pipeline:
        """Return a pipeline: a transaction of one slot, or commands of any slots."""
        return _ClusterPipeline(self, transaction=transaction)

    async def servers(self) -> list["Redis"]:
        """Return the clients of all masters. Raises RedisError if no server responds."""
        await self.slot_map.ready()
        return [self.slot_map.client(address) for address in self.slot_map.masters]

    async def aclose(self) -> None:
        """Close the connections to all servers."""
        await self.slot_map.aclose()
        above: Any = super()
        await above.aclose()


async def _asking(client: "Redis", args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    pipeline = client.pipeline(transaction=False)
    pipeline.execute_command(ASKING)
    pipeline.execute_command(*args, **options)
    _, reply = await pipeline.execute()
    return reply


class _ClusterPipeline(Pipeline):
    """Sends the commands of each server in one pipeline, and those that fail to move one by one.

    If a server does not respond, its error is the reply to each of its commands.
    """

    def __init__(self, cluster: Any, *, transaction: bool) -> None:
        super().__init__(cluster.connection_pool, cluster.response_callbacks, transaction, None)
        self._cluster = cluster
        self._slots: SlotMap = cluster.slot_map

    @override
    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        plain, self.command_stack = list(self.command_stack), []
        commands = [(with_absent_key(args), options) for args, options in plain]
        if not commands:
            return []
        await self._slots.ready()
        if self.is_transaction:
            return await self._execute_in_one(commands)
        replies = await self._execute_in_each(commands)
        for number, (args, options) in enumerate(plain):
            error = _error(replies[number])
            # After a lost connection, the server may have executed the command.
            if error is None or isinstance(error, RedisConnectionError):
                continue
            if self._slots.redirection(error) is not None:
                try:
                    replies[number] = await self._cluster.execute_command(*args, **options)
                except RedisError as again:
                    replies[number] = again
        if raise_on_error and (errors := [*filter(None, map(_error, replies))]):
            raise errors[0]
        return replies

    async def _execute_in_each(self, commands: Sequence[Any]) -> list[Any]:
        numbers: dict[Address, list[int]] = {}
        for number, (args, _) in enumerate(commands):
            numbers.setdefault(self._slots.owner(slot_of(args)), []).append(number)
        sending = (self._send(at, [commands[each] for each in of]) for at, of in numbers.items())
        found = await asyncio.gather(*sending)
        replies = dict(zip(chain(*numbers.values()), chain(*found), strict=True))
        return [replies[number] for number in range(len(commands))]

    async def _send(self, address: Address, commands: Sequence[Any]) -> list[Any]:
        pipeline = self._slots.client(address).pipeline(transaction=self.is_transaction)
        for args, options in commands:
            pipeline.execute_command(*args, **options)
        try:
            return await pipeline.execute(raise_on_error=self.is_transaction)
        except RedisError as error:
            self._slots.redirection(error)
            if self.is_transaction:
                raise
            return [error] * len(commands)

    async def _execute_in_one(self, commands: Sequence[Any]) -> list[Any]:
        slot, until = slot_of(commands[0][0]), monotonic() + MOST_PAUSES_SECONDS
        while True:
            try:
                return await self._send(self._slots.owner(slot), commands)
            except (AskError, TryAgainError, ClusterDownError):
                # Nothing was executed. A slot that is being moved has no transactions.
                if monotonic() > until:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)


def _error(reply: Any) -> RedisError | None:
    return reply if isinstance(reply, RedisError) else None


def slot_map_of(client: Any) -> SlotMap | None:
    """Return the slot map of a client of a cluster; None for a client of one server."""
    slots: SlotMap | None = getattr(client, "slot_map", None)
    return slots


async def server_of(client: "Redis", key: str) -> "Redis":
    """Return the client of the server that has a key. Raises RedisError if none responds."""
    slots = slot_map_of(client)
    if slots is None:
        return client
    await slots.ready()
    return slots.client(slots.owner(slot_of_key(key)))

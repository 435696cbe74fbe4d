"""Several Redis without a cluster: a client that sends each command to the Redis of its key.

Keys are divided into parts, such as limits and replies. No script or transaction uses keys of two
parts, because each uses keys of one hash tag only.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError
from typing_extensions import override

from common.redis_cluster import SlotMap, by_owner, first_key, servers_of, slot_map_of

PartT = TypeVar("PartT", bound=str)


class Parts:
    """The client of each part; several parts may share one."""

    def __init__(
        self, clients: "Mapping[PartT, Redis]", part_of: Callable[[str | bytes], PartT]
    ) -> None:
        """Take ownership of the clients; commands without a key go to the first one."""
        self._clients: Mapping[str, Redis] = {str(part): each for part, each in clients.items()}
        self._part_of = part_of
        self._first = next(iter(self._clients.values()))

    @property
    def distinct(self) -> "list[Redis]":
        """Every client, once."""
        return list(dict.fromkeys(self._clients.values()))

    def of_key(self, key: str | bytes) -> "Redis":
        """Return the client of a key."""
        return self._clients[self._part_of(key)]

    def of(self, args: Sequence[Any]) -> "Redis":
        """Return the client of a command."""
        key = first_key(args)
        return self._first if key is None else self.of_key(key)


class PartsClient:
    """Mixed into a class of client, makes it send each command to the client of its first key."""

    parts: Parts

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command. Raises RedisError."""
        return await self.parts.of(args).execute_command(*args, **options)

    def pipeline(self, *, transaction: bool = True) -> Pipeline:
        """Return a pipeline: a transaction of one slot, or commands of any keys."""
        return _PartsPipeline(self, transaction=transaction)

    async def servers(self) -> "list[Redis]":
        """Return the clients of all servers. Raises RedisError if a cluster does not respond."""
        found = await asyncio.gather(*map(servers_of, self.parts.distinct))
        return [server for servers in found for server in servers]

    async def aclose(self) -> None:
        """Close the clients of all parts."""
        for client in self.parts.distinct:
            await client.aclose()


class _PartsPipeline(Pipeline):
    """Sends the commands of each client in one pipeline."""

    def __init__(self, whole: Any, *, transaction: bool) -> None:
        super().__init__(whole.connection_pool, whole.response_callbacks, transaction, None)
        self._parts: Parts = whole.parts

    @override
    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands, self.command_stack = list(self.command_stack), []
        replies = await by_owner(commands, self._parts.of, self._send)
        for reply in replies:
            if raise_on_error and isinstance(reply, RedisError):
                raise reply
        return replies

    async def _send(self, client: "Redis", commands: Sequence[Any]) -> list[Any]:
        pipeline = client.pipeline(transaction=self.is_transaction)
        for args, options in commands:
            pipeline.execute_command(*args, **options)
        try:
            return await pipeline.execute(raise_on_error=False)
        except RedisError as error:
            return [error] * len(commands)


def connect_parts(
    urls: Mapping[PartT, str],
    connect: "Callable[[str], Redis]",
    part_of: Callable[[str | bytes], PartT],
    *,
    kind: type["Redis"],
) -> "Redis":
    """Return one client for the Redis of each part; parts with one URL share a connected client.

    If all have one URL, this is its client. Else it is of the class `kind`.
    """
    clients = {url: connect(url) for url in dict.fromkeys(urls.values())}
    first = next(iter(clients.values()))
    if len(clients) == 1:
        return first
    client: Any = type("Divided", (PartsClient, kind), {})(connection_pool=first.connection_pool)
    client.parts = Parts({part: clients[url] for part, url in urls.items()}, part_of)
    whole: Redis = client
    return whole


def parts_of(client: Any) -> Parts | None:
    """Return the parts of a client; None if it has one Redis."""
    parts: Parts | None = getattr(client, "parts", None)
    return parts


def slot_map_of_key(client: "Redis", key: str) -> SlotMap | None:
    """Return the slot map of the cluster that has a key; None if it is on one server."""
    parts = parts_of(client)
    return slot_map_of(client if parts is None else parts.of_key(key))

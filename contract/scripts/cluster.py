"""Connections to the servers of a Redis Cluster that all tasks share, one to each server."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from redis.asyncio import Redis

from common.redis_cluster import (
    ASKING,
    Address,
    Redirection,
    SlotMap,
    redirected,
    slot_map_of,
    with_absent_key,
)
from contract.scripts import CommandExecutor
from contract.scripts.executor import SharedConnection


class ClusterConnection:
    """Sends each command on the shared connection to the server of its first key.

    Commands of one iteration of the event loop go to each server in one write. Those whose slot has
    moved are sent again.
    """

    def __init__(self, slots: SlotMap, connect: Callable[["Redis"], SharedConnection]) -> None:
        self._slots = slots
        self._connect = connect
        self._connections: dict[Address, SharedConnection] = {}

    def execute_command(self, *args: Any, **_options: Any) -> asyncio.Task[Any]:
        """Send one command. The task returns its reply, or raises RedisError or OSError."""
        args = tuple(with_absent_key(args))
        return asyncio.create_task(redirected(self._slots, args, partial(self._send, args)))

    async def servers(self) -> list[SharedConnection]:
        """Return the connections to all masters. Raises RedisError if no server responds."""
        await self._slots.ready()
        return [self._connection(address) for address in self._slots.masters]

    async def aclose(self) -> None:
        """Fail all commands without a reply. The client can be closed then."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.aclose()

    def _connection(self, address: Address) -> SharedConnection:
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connect(self._slots.client(address))
            self._connections[address] = connection
        return connection

    def _send(
        self, args: tuple[Any, ...], address: Address, again: Redirection
    ) -> asyncio.Future[Any]:
        connection = self._connection(address)
        if again.is_asking:
            # In the same write, so nothing is between the two. The command has its error, too.
            connection.execute_command(ASKING).add_done_callback(asyncio.Future.exception)
        return connection.execute_command(*args)


def shared_connection(
    client: "Redis", connect: Callable[["Redis"], SharedConnection]
) -> SharedConnection | ClusterConnection:
    """Return a shared connection of a client, made by `connect`; one to each server if several."""
    slots = slot_map_of(client)
    return connect(client) if slots is None else ClusterConnection(slots, connect)


async def ask_every_server(executor: CommandExecutor, *command: Any) -> list[Any]:
    """Send a command to all masters, or to the only server.

    The reply of a server that does not respond is None. Raises RedisError if none responds.
    """
    ask = getattr(executor, "servers", None)
    servers = [executor] if ask is None else await ask()
    replies = await asyncio.gather(
        *(server.execute_command(*command) for server in servers), return_exceptions=True
    )
    found = [None if isinstance(each, BaseException) else each for each in replies]
    if replies and all(each is None for each in found):
        raise replies[0]
    return found


class ServerProcesses:
    """The processes of all servers, as of the last look."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    async def have_changed(self, executor: CommandExecutor) -> bool:
        """Return whether a server was started again or replaced since the last look.

        It may lack data then. A server that does not respond counts as unchanged until it does.
        Raises RedisError if none responds.
        """
        infos = await ask_every_server(executor, "INFO", "server")
        found = {str(each["run_id"]) for each in infos if each is not None}
        has_changed = bool(self._known) and not found <= self._known
        if has_changed or None not in infos:
            self._known = found
        return has_changed

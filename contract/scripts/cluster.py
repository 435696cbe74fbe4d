"""Connections to the servers of a Redis Cluster that all tasks share, one to each server."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis

from common.redis_cluster import (
    ASKING,
    MOST_PAUSES_SECONDS,
    MOST_REDIRECTIONS,
    Address,
    Redirection,
    SlotMap,
    slot_map_of,
    slot_of,
)
from contract.scripts import CommandExecutor
from contract.scripts.executor import SharedConnection

ConnectionT = TypeVar("ConnectionT", bound=SharedConnection)


class _Sent(msgspec.Struct):
    args: tuple[Any, ...]
    slot: int
    reply: asyncio.Future[Any]
    began: float
    """When it was issued, in `time.perf_counter`."""
    address: Address = ("", 0)
    """Where it was sent last."""
    redirections: int = 0


class ClusterConnection:
    """Sends each command on the shared connection to the server of its first key.

    Commands of one iteration of the event loop go to each server in one write. Those whose slot has
    moved are sent again.
    """

    def __init__(self, slots: SlotMap, connect: Callable[["Redis"], SharedConnection]) -> None:
        self._slots = slots
        self._connect = connect
        self._connections: dict[Address, SharedConnection] = {}

    def execute_command(self, *args: Any, **_options: Any) -> asyncio.Future[Any]:
        """Send one command. The future returns its reply, or raises RedisError or OSError."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._send(_Sent(args, slot_of(args), reply, perf_counter()), Redirection())
        return reply

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

    def _send(self, sent: _Sent, redirection: Redirection) -> None:
        if redirection.address is None and not self._slots.is_known:
            ready = asyncio.ensure_future(self._slots.ready())
            ready.add_done_callback(partial(self._found, sent))
            return
        sent.address = redirection.address or self._slots.owner(sent.slot)
        connection = self._connection(sent.address)
        if redirection.is_asking:
            # In the same write, so nothing is between the two.
            connection.execute_command(ASKING).add_done_callback(_ignore)
        reply = connection.execute_command(*sent.args)
        reply.add_done_callback(partial(self._replied, sent))

    def _found(self, sent: _Sent, ready: "asyncio.Future[None]") -> None:
        if not ready.cancelled() and ready.exception() is None:
            self._send(sent, Redirection())
        elif not sent.reply.done():
            sent.reply.set_exception(ready.exception() or asyncio.CancelledError())

    def _replied(self, sent: _Sent, reply: "asyncio.Future[Any]") -> None:
        if _ignore(reply) or sent.reply.done():
            return
        error = reply.exception()
        if error is None:
            sent.reply.set_result(reply.result())
            return
        again = self._slots.redirection(error)
        if again is None or self._is_enough(sent, again):
            sent.reply.set_exception(error)
        elif again.is_lost:
            replaced = asyncio.ensure_future(self._slots.is_replaced(sent.slot, sent.address))
            replaced.add_done_callback(partial(self._lost, sent, error))
        elif again.pause_seconds:
            loop = asyncio.get_running_loop()
            loop.call_later(again.pause_seconds, self._send, sent, again)
        else:
            sent.redirections += 1
            self._send(sent, again)

    def _lost(self, sent: _Sent, error: BaseException, replaced: "asyncio.Future[bool]") -> None:
        if not replaced.cancelled() and replaced.result():
            sent.redirections += 1
            self._send(sent, Redirection())
        elif not sent.reply.done():
            sent.reply.set_exception(error)

    def _is_enough(self, sent: _Sent, again: Redirection) -> bool:
        if again.pause_seconds:
            return perf_counter() - sent.began > MOST_PAUSES_SECONDS
        return sent.redirections >= MOST_REDIRECTIONS


def _ignore(reply: "asyncio.Future[Any]") -> bool:
    """Retrieve an error, which asyncio would log. Return whether the reply was cancelled."""
    if not reply.cancelled():
        reply.exception()
    return reply.cancelled()


def shared_connection(
    client: "Redis", connect: Callable[["Redis"], ConnectionT]
) -> "ConnectionT | ClusterConnection":
    """Return a shared connection of a client, made by `connect`; for a cluster, one per server."""
    slots = slot_map_of(client)
    return connect(client) if slots is None else ClusterConnection(slots, connect)


async def ask_every_server(executor: CommandExecutor, *command: Any) -> list[Any]:
    """Send a command to every master of a cluster, or to the only server. Raises RedisError."""
    servers: Callable[[], Awaitable[list[CommandExecutor]]] | None
    servers = getattr(executor, "servers", None)
    each = [executor] if servers is None else await servers()
    return await asyncio.gather(*(server.execute_command(*command) for server in each))


async def server_id(executor: CommandExecutor) -> str:
    """Return the ids of the processes of all servers.

    It changes when one of them was started again or replaced, and may lack data. Raises RedisError.
    """
    infos = await ask_every_server(executor, "INFO", "server")
    return " ".join(sorted(str(each["run_id"]) for each in infos))

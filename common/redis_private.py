"""The private parts of redis-py that Sluice uses. Only this module does.

`pyproject.toml` limits redis-py to the minor versions that have these parts.
"""

import asyncio
from collections.abc import Iterable
from typing import Any, Final

from redis._parsers import BaseParser
from redis.asyncio import Redis
from redis.connection import HiredisRespSerializer
from redis.exceptions import ConnectionError as RedisConnectionError

_FULL_BUFFER_BYTES: Final = 65_536
"""Unsent bytes of a connection beyond which asyncio and uvloop make the writer wait."""

to_error = BaseParser.parse_error
"""Returns the exception for the text of an error that the server sent."""


def transport_of(connection: Any) -> asyncio.Transport:
    """Return the transport of a connection that is open."""
    transport: asyncio.Transport = connection._writer.transport
    return transport


def has_ended(connection: Any) -> bool:
    """Whether one side has closed a connection, as far as this process knows."""
    return transport_of(connection).is_closing() or bool(connection._reader.at_eof())


def guarded(client: "Redis") -> "Redis":
    """Make a client's connections raise only RedisError, and pack and send commands faster."""
    pool: Any = client.connection_pool
    pool.connection_class = type("GuardedConnection", (_Guard, pool.connection_class), {})
    return client


class _Guard:
    """Packs commands in C, sends them without a task, and converts an error of uvloop.

    redis-py packs in C only for blocking clients. Packing in Python takes ten times as long. It
    also starts a task with a timeout for each write, although asyncio only waits if its buffer is
    full.

    Callers that survive an unavailable Redis catch RedisError; uvloop's RuntimeError would end
    them.
    """

    _packer = HiredisRespSerializer()

    def pack_command(self, *args: Any) -> list[bytes]:
        packed: list[bytes] = self._packer.pack(*args)
        return packed

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [part for command in commands for part in self.pack_command(*command)]

    async def send_packed_command(self, command: Any, **options: Any) -> None:
        this: Any = self
        above: Any = super()
        try:
            if this.is_connected and not this.health_check_interval:
                transport = transport_of(self)
                transport.writelines(command)
                if transport.get_write_buffer_size() < _FULL_BUFFER_BYTES:
                    return
                # redis-py waits, in a task with a timeout, until there is room again.
                command = ()
            await above.send_packed_command(command, **options)
        except RuntimeError as error:
            raise RedisConnectionError("the connection is closed already") from error

"""Gateway processes that inherit the listening sockets of their parent, and may share them."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import count
from typing import Final

import msgspec
from msgspec.json import encode

from common.tasks import unless
from gateway.platform.concurrency.parent_death import adopt_orphans
from gateway.platform.settings import Settings
from gateway.process.supervision.supervisor import ChildSpec, Supervisor
from gateway.records.errors import StartupError


class OneOfMany(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway process whose listening sockets are its parent's."""

    number: int
    """From 1; a process that replaces another one has the same number."""
    customers: list[int]
    """File descriptors of the customers' sockets."""
    operators: list[int] = []
    """File descriptors of the operators' sockets; if there are none, the process opens one."""
    serving: int | None = None
    """File descriptor of a pipe to a parent that has checked the settings; None for another."""

    def report(self) -> None:
        """Report to the parent that this process serves."""
        if self.serving is not None:
            os.write(self.serving, b".")
            os.close(self.serving)


def inherited(descriptors: list[int]) -> list[socket.socket] | None:
    """Return the parent's sockets, which no child of this process inherits; None without any."""
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    for each in sockets:
        each.set_inheritable(False)
    return sockets or None


SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
DRAIN_MARGIN_SECONDS: Final = 15.0
"""After the drain, a gateway must report errors to remaining requests, settle them and close."""
LAST_PORT: Final = 65535

logger = logging.getLogger(__name__)


def stop_seconds(settings: Settings) -> float:
    """Return how long a gateway may take to exit after SIGTERM."""
    drain = settings.drain_delay + settings.drain_timeout
    return drain.total_seconds() + DRAIN_MARGIN_SECONDS


async def run_gateways(
    settings: Settings, sluice: tuple[str, ...], variables: Mapping[str, str]
) -> bool:
    """Run `settings.processes` gateways until a signal; return whether all have drained.

    The processes share the queue of each customers' socket, so that one of them accepts a
    connection while others are busy or restart (docs/decisions/0034-shared-listening-socket.md).
    Each opens its own operators' port: the first process `settings.operator_port`, the next process
    the next port.

    Args:
        settings: The settings of all processes.
        sluice: The program that runs the commands of `sluice`.
        variables: Environment variables of the processes, in addition to this process's own.

    Raises:
        StartupError: An address cannot be used, or a process did not start.
    """
    first_port, processes = settings.operator_port, settings.processes
    if first_port + processes - 1 > LAST_PORT:
        raise StartupError(
            f"SLUICE_OPERATOR_PORT: {processes} processes need as many ports from {first_port} on, "
            f"but the last port is {LAST_PORT}."
        )
    loop = asyncio.get_running_loop()
    supervisor, stopping, signals = Supervisor(logger.warning), asyncio.Event(), count(1)

    def on_signal() -> None:
        stopping.set()
        if (number := next(signals)) == 2:
            supervisor.terminate()  # Shortens the drain, as for one gateway.
        elif number > 2:
            supervisor.kill()

    async def serve() -> None:
        await supervisor.start(specs)
        await supervisor.while_alive(asyncio.create_task(serving.readexactly(processes)))
        supervisor.settle()
        logger.info("%d gateway processes are serving", processes)
        await asyncio.Event().wait()

    with ExitStack() as pipe, ExitStack() as sockets:
        customers = await _bind("SLUICE_PORT", settings.host, settings.port, sockets)
        serving, written = await _open_pipe(pipe)
        specs = [
            ChildSpec(
                name=f"gateway process {number}",
                command=(
                    *sluice,
                    "gateway",
                    "--one-of-many",
                    encode(OneOfMany(number=number, customers=customers, serving=written)).decode(),
                ),
                environment={**variables, **_operator_port(first_port, number)},
                descriptors=(*customers, written),
                stop_seconds=stop_seconds(settings),
            )
            for number in range(1, processes + 1)
        ]
        adopt_orphans()
        for number in SIGNALS:
            loop.add_signal_handler(number, on_signal)
        try:
            await unless(stopping, serve())
        finally:
            # The port refuses connections as soon as the processes have closed it too.
            sockets.close()
            statuses = await supervisor.stop()
    return not any(statuses)


def _operator_port(first: int, number: int) -> dict[str, str]:
    return {"SLUICE_OPERATOR_PORT": str(first + number - 1)} if first else {}


async def _open_pipe(pipe: ExitStack) -> tuple[asyncio.StreamReader, int]:
    """Return a reader and the descriptor from which it reads, which `pipe` closes."""
    reading, writing = os.pipe()
    pipe.callback(os.close, writing)
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", 0)
    )
    pipe.callback(transport.close)
    return reader, writing


async def _bind(name: str, host: str, port: int, sockets: ExitStack) -> list[int]:
    """Return the descriptor of a socket for each address of a host, which `sockets` closes.

    The sockets refuse connections until a process listens. Raises StartupError if an address cannot
    be used.
    """
    try:
        server = await asyncio.get_running_loop().create_server(
            asyncio.Protocol, host, port, start_serving=False
        )
    except OSError as error:
        raise StartupError(f"{name}: cannot listen on {host}:{port} ({error.strerror}).") from error
    # The server closes its own sockets.
    bound = [sockets.enter_context(each.dup()) for each in server.sockets]
    server.close()
    return [each.fileno() for each in bound]

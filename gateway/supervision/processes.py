"""Several gateway processes that share the listening sockets of one supervisor."""

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from msgspec.json import encode

from contract.tasks import end_task
from gateway.concurrency.tether import adopt_orphans
from gateway.errors import StartupError
from gateway.server.one_of_many import OneOfMany
from gateway.settings import Settings
from gateway.supervision.child import ChildSpec
from gateway.supervision.metrics_hub import MetricsHub
from gateway.supervision.supervisor import Supervisor

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
DRAIN_MARGIN_SECONDS: Final = 15.0
"""After the drain, a gateway must report errors to remaining requests, settle them and close."""

logger = logging.getLogger(__name__)


def stop_seconds(settings: Settings) -> float:
    """Return how long a gateway may take to exit after SIGTERM."""
    drain = settings.drain_delay + settings.drain_timeout
    return drain.total_seconds() + DRAIN_MARGIN_SECONDS


async def run_gateways(
    settings: Settings, sluice: tuple[str, ...], variables: Mapping[str, str]
) -> bool:
    """Run `settings.processes` gateways until a signal; return whether all have drained.

    The processes share the queue of each listening socket, so that one of them accepts a connection
    while others are busy or restart (docs/decisions/0034-shared-listening-socket.md).

    Args:
        settings: The settings of all processes.
        sluice: The program that runs the commands of `sluice`.
        variables: Environment variables of the processes, in addition to this process's own.

    Raises:
        StartupError: An address cannot be used, or a process did not start.
    """
    with ExitStack() as sockets, tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        customers = await _bind("SLUICE_PORT", settings.host, settings.port, sockets)
        operators: list[int] = []
        if settings.operator_port:
            address = (settings.operator_host, settings.operator_port)
            operators = await _bind("SLUICE_OPERATOR_PORT", *address, sockets)
        metrics = Path(folder) / "metrics"
        specs = []
        for number in range(1, settings.processes + 1):
            one = OneOfMany(
                number=number,
                customers=customers,
                operators=operators,
                metrics=str(metrics),
            )
            specs.append(
                ChildSpec(
                    name=f"gateway process {number}",
                    command=(*sluice, "gateway", "--one-of-many", encode(one).decode()),
                    environment=variables,
                    descriptors=(*customers, *operators),
                    stop_seconds=stop_seconds(settings),
                )
            )
        return await _Gateways(specs, metrics).run(sockets)


class _Gateways:
    """The processes, the sums of their metrics, and the signals to this process."""

    def __init__(self, specs: list[ChildSpec], metrics: Path) -> None:
        self._specs = specs
        self._metrics = metrics
        self._supervisor = Supervisor(logger.warning)
        self._signals = 0
        self._stop_requested = asyncio.Event()
        self._joined = asyncio.Semaphore(0)

    async def run(self, sockets: ExitStack) -> bool:
        """Run until a signal, then close the sockets; return whether all processes have drained."""
        adopt_orphans()
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        hub = MetricsHub(on_join=self._joined.release, on_silence=_kill)
        await hub.listen(self._metrics)
        watching = asyncio.create_task(hub.watch())
        try:
            await self._serve()
        finally:
            # The port refuses connections as soon as the processes have closed it too.
            sockets.close()
            statuses = await self._supervisor.stop()
            await end_task(watching)
            hub.close()
        return not any(statuses)

    async def _serve(self) -> None:
        stopping = asyncio.create_task(self._stop_requested.wait())
        starting = asyncio.create_task(self._start())
        await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if not self._stop_requested.is_set():
                starting.result()
                await stopping
        finally:
            await end_task(stopping, starting)

    async def _start(self) -> None:
        await self._supervisor.start(self._specs)
        await self._supervisor.while_alive(asyncio.create_task(self._all_joined()))
        self._supervisor.settle()
        logger.info("%d gateway processes are serving", len(self._specs))

    async def _all_joined(self) -> None:
        for _ in self._specs:
            await self._joined.acquire()

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop_requested.set()
        if self._signals == 2:
            self._supervisor.terminate()  # Shortens the drain, as for one gateway.
        elif self._signals > 2:
            self._supervisor.kill()


def _kill(pid: int) -> None:
    logger.error("killing the gateway process with id %d, which does not respond", pid)
    # It may have exited just now.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


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

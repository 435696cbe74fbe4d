"""HTTP server with graceful shutdown; uvicorn's own cuts streams off without an error event."""

import asyncio
import faulthandler
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import uvicorn
from fastapi import FastAPI
from redis.asyncio import Redis
from typing_extensions import override

from common.logs import log_ready
from common.redis_url import describe
from contract.outcomes import FailureCode
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.completions.stored.service import Responses
from gateway.http.draining import Draining
from gateway.http.services import Services
from gateway.limits.reservations import Reservations
from gateway.models.catalogue import Catalogue
from gateway.platform.database import engine
from gateway.platform.database.engine import Database
from gateway.platform.settings import Settings
from gateway.process.supervision.processes import OneOfMany, inherited

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
LINGER_SECONDS: Final = 0.1
"""How long requests that arrive while the listener closes still get a 503 response."""
CUT_SECONDS: Final = 5.0
"""How long clients have to read the final error of their streams."""
UNWIND_SECONDS: Final = 1.0
POLL_SECONDS: Final = 0.05
STUCK_SECONDS: Final = 60.0
"""Time without a turn of the event loop after which one of several processes ends, as after the
chart's liveness probe. Probes cannot find such a process: others accept their connections."""
TICKS: Final = 50
"""Ticks, of 0.1 s each, between two turns that are noted."""

logger = logging.getLogger(__name__)


class GracefulServer(uvicorn.Server):
    """Serves until the first SIGTERM or SIGINT, then drains; a second signal shortens the drain.

    1. /readyz fails, and connections close after their responses. All requests are served for
       `drain_delay`.
    2. The gateway accepts no new requests; running requests continue for `drain_timeout`.
    3. The gateway ends the remaining requests with a retryable error, and settles them. If Redis
       does not confirm this, it waits for the rest of `drain_timeout`.
    4. It closes everything else.

    The operators' server responds until the end, so that metrics show the progress.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        app: FastAPI,
        settings: Settings,
        *,
        operators: uvicorn.Server | None,
        one: OneOfMany | None,
    ) -> None:
        """Do not serve yet. `one` describes this process if it inherits sockets of its parent."""
        super().__init__(config)
        self._operators = operators
        self._one = one
        self._app = app
        self._drain: Draining = app.state.drain
        self._delay_seconds = settings.drain_delay.total_seconds()
        self._drain_seconds = settings.drain_timeout.total_seconds()
        self._is_hurried = False

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Unlike uvicorn, do not raise the signal again at the end: a completed drain is a success.
        earlier = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._is_hurried = self.should_exit
        self.should_exit = True
        self._drain.is_draining = True

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._operators is not None:
            await self._start_operators(self._operators)
        if self.started:
            log_ready("sluice gateway", *self._facts())
        if self._one is not None:
            self._one.report()

    def _facts(self) -> Iterator[str]:
        services: Services = self._app.state.services
        yield f"API at {_addresses(self)}"
        if self._operators is not None:
            yield f"operators' API at {_addresses(self._operators)}"
        yield describe(services[Redis])
        yield engine.describe(services[Database].engine.url)
        yield f"models: {', '.join(sorted(services[Catalogue].names)) or 'none yet'}"

    async def _start_operators(self, operators: uvicorn.Server) -> None:
        config = operators.config
        config.load()
        operators.lifespan = config.lifespan_class(config)
        try:
            await operators.startup(None if self._one is None else inherited(self._one.operators))
        except SystemExit:
            # The port is in use, which uvicorn has logged.
            await self.lifespan.shutdown()
            raise

    @override
    async def on_tick(self, counter: int) -> bool:
        if self._one is not None and counter % TICKS == 0:
            # A thread without Python's lock shows where the process is stuck, and ends it.
            faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        if self._operators is not None:
            await self._operators.on_tick(counter)
        return await super().on_tick(counter)

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._wait(self._delay_seconds)
        self._drain.is_closed = True
        for server in self.servers:
            server.close()
        await asyncio.sleep(LINGER_SECONDS)
        for connection in list(self.server_state.connections):
            connection.shutdown()
        deadline = time.monotonic() + self._drain_seconds
        if not await self._wait(self._drain_seconds, until=self._is_idle):
            await self._cut_off()
        # While the server of the limits is away, the loops repeat the settlements.
        reservations: Reservations = self._app.state.services[Reservations]
        await self._wait(deadline - time.monotonic(), until=lambda: reservations.are_confirmed)
        if self._operators is not None:
            await self._operators.shutdown()
        await self.lifespan.shutdown()

    def _is_idle(self) -> bool:
        return not (self.server_state.connections or self.server_state.tasks)

    async def _cut_off(self) -> None:
        left = len(self.server_state.tasks)
        logger.warning("ending %d requests that did not finish during the drain", left)
        services: Services = self._app.state.services
        services[Responses].hand_over()
        deadline = time.monotonic() + CUT_SECONDS
        while not self._is_idle() and time.monotonic() < deadline:
            # Repeat, because requests that were still being read or checked join the queue later.
            services[Dispatcher].fail_all(FailureCode.GATEWAY_STOPPING)
            await asyncio.sleep(POLL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if tasks := list(self.server_state.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=UNWIND_SECONDS)

    async def _wait(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait for a condition, a timeout or a second signal; return whether it holds."""
        deadline = time.monotonic() + seconds
        while not until():
            if self._is_hurried or time.monotonic() >= deadline:
                return False
            await self.on_tick(0)  # Updates the Date header.
            await asyncio.sleep(POLL_SECONDS)
        return True


def _addresses(server: uvicorn.Server) -> str:
    """Return the URLs at which a server listens."""
    names = (each.getsockname() for listener in server.servers for each in listener.sockets)
    return ", ".join(
        f"http://{f'[{host}]' if ':' in host else host}:{port}" for host, port, *_ in names
    )

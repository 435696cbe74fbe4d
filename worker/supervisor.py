"""Supervision of the engine: when it dies, close its remains and start another one.

Restarts are retried without limit, with exponential backoff up to a maximum pause. An engine that
has run for a while resets the pause.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.tasks import Backoff, unless
from worker import telemetry
from worker.engine.base import Engine, EngineInfo

_log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
STEADY_SECONDS = 60.0
"""Time an engine must have run for its death to reset the backoff."""

_CLOSE_SECONDS = 30.0


@dataclass(eq=False)
class EngineSupervisor:
    """Starts engines, one after the other."""

    make_engine: Callable[[], Engine]
    stopping: asyncio.Event
    longest_pause_seconds: float
    on_failure: Callable[[str], None]
    check: Callable[[EngineInfo], None] = lambda _: None
    """Raises an error about a started engine that must not run jobs."""
    _engine: Engine | None = None
    _started_at: float = 0.0
    _died_at: float | None = None

    def __post_init__(self) -> None:
        self._backoff = Backoff(FIRST_PAUSE_SECONDS, self.longest_pause_seconds)

    @property
    def down_seconds(self) -> float:
        """Time since an engine died that has no replacement yet. Any thread may read it."""
        died_at = self._died_at
        return 0.0 if died_at is None else time.monotonic() - died_at

    async def start(self) -> Engine | None:
        """Start the first engine; None if shutdown begins meanwhile. Passes on its exceptions."""
        engine = self._engine = self.make_engine()
        await unless(self.stopping, engine.start())
        if self.stopping.is_set():
            return None
        self.check(engine.info)
        self._started_at = time.monotonic()
        self._died_at = None
        return engine

    async def restart(self, failure: str) -> Engine | None:
        """Start a replacement for an engine that died; None if shutdown begins meanwhile."""
        self._died_at = now = time.monotonic()
        if now - self._started_at >= STEADY_SECONDS:
            self._backoff.reset()
        while True:
            self.on_failure(failure)
            await self.aclose()
            await unless(self.stopping, self._pause())
            if self.stopping.is_set():
                return None
            try:
                engine = await self.start()
            except Exception as error:  # A later start may succeed.
                failure = f"The engine could not be started: {error}"
                _log.error("%s", failure)
                continue
            if engine is not None:
                telemetry.ENGINE_RESTARTS.inc()
            return engine

    async def aclose(self) -> None:
        """Close the engine in whatever state it is."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            await asyncio.wait_for(engine.aclose(), _CLOSE_SECONDS)
        except Exception:  # The engine is broken.
            _log.exception("The engine could not be closed")

    async def _pause(self) -> None:
        pause_seconds = self._backoff.next_seconds()
        _log.info("Restarting the engine in %.0f s", pause_seconds)
        telemetry.next_start_at(time.monotonic() + pause_seconds)
        await asyncio.sleep(pause_seconds)

"""The worker process: start-up, signals, the order of shutting down, exit codes.

Exit codes: 0 after a signal, 1 when the engine could not be started, 70 when the engine died.
"""

import asyncio
import contextlib
import gc
import logging
import signal
from pathlib import Path

import uvloop
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from contract.queue import JobQueue
from contract.redis_url import redis_client
from worker import telemetry
from worker.backoff import keep_doing
from worker.catalogue import ANNOUNCE_SECONDS, Catalogue
from worker.engine.base import Engine, EngineDeadError
from worker.engine.scripted import Script, ScriptedEngine
from worker.health import HealthServer
from worker.runner import Runner
from worker.settings import Settings
from worker.tasks import cancel

_log = logging.getLogger(__name__)

EXIT_STOPPED = 0
EXIT_NOT_STARTED = 1
EXIT_ENGINE_DEAD = 70

_REDIS_TIMEOUT_SECONDS = 5.0


def run(settings: Settings) -> int:
    """Run a worker until it is stopped by a signal or its engine dies. Return the exit code."""
    logging.basicConfig(
        level=settings.log_level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    return uvloop.run(serve(settings, make_engine(settings)))


def make_engine(settings: Settings) -> Engine:
    """Return the engine that the settings ask for, not started."""
    if settings.engine == "vllm":
        from worker.engine.vllm import VllmEngine

        return VllmEngine(settings)
    script = Script(
        step_seconds=settings.scripted_step_seconds,
        prefill_seconds_per_token=settings.scripted_prefill_seconds_per_token,
        max_sequences=settings.max_sequences or 256,
        kv_cache_tokens=settings.scripted_kv_cache_tokens,
        context_window=settings.context_window,
        completion_tokens=settings.scripted_completion_tokens,
        deadly_token_id=settings.scripted_deadly_token_id,
        dies_on_signal=settings.scripted_dies_on_signal,
    )
    return ScriptedEngine(Path(settings.model_path), script)


async def serve(settings: Settings, engine: Engine) -> int:
    """Run one worker with this engine, which is started and closed here."""
    redis = redis_client(
        settings.redis_url.get_secret_value(),
        socket_timeout=_REDIS_TIMEOUT_SECONDS,
        socket_connect_timeout=_REDIS_TIMEOUT_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )
    async with redis:
        return await _Process(settings, engine, redis).run()


class _Process:
    """One worker process from start to end."""

    def __init__(self, settings: Settings, engine: Engine, redis: Redis) -> None:
        self._settings = settings
        self._engine = engine
        self._redis = redis
        self._queue = JobQueue(redis, settings.served_name)
        self._catalogue = Catalogue(
            redis,
            self._queue,
            worker=settings.worker_id,
            engine=settings.engine,
            folder=Path(settings.model_path),
            dialect=settings.dialect or "",
            aliases=settings.model_aliases,
        )
        self._runner: Runner | None = None
        self._stop_asked = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        health = self._open_health()
        announcing = asyncio.create_task(keep_doing("announce this worker", self._announce))
        try:
            return await self._load_and_serve()
        finally:
            telemetry.READY.set(0)
            await cancel([announcing])
            await self._withdraw()
            await self._engine.aclose()
            if health is not None:
                health.close()
            _log.info("Stopped")

    async def _load_and_serve(self) -> int:
        if not await self._load():
            return EXIT_STOPPED if self._stop_asked.is_set() else EXIT_NOT_STARTED
        self._runner = Runner(
            self._redis,
            self._queue,
            self._engine,
            worker=self._settings.worker_id,
            lease_ms=self._settings.lease_ms,
            most_pending_deltas=self._settings.reply_buffer_deltas,
            gather_seconds=self._settings.gather_seconds,
        )
        _settle_memory()
        telemetry.READY.set(1)
        self._catalogue.engine_started(self._engine.info)
        self._log_ready()
        try:
            await asyncio.gather(self._runner.run(), self._announce_once())
        except EngineDeadError as error:
            _log.error("The engine died: %s", error)
            return EXIT_ENGINE_DEAD
        return EXIT_STOPPED

    async def _load(self) -> bool:
        """Start the engine, unless a signal comes first."""
        _log.info(
            "Loading model %s from %s (about half a minute on a CPU)",
            self._settings.served_name,
            self._settings.model_path,
        )
        starting = asyncio.create_task(self._engine.start())
        stopping = asyncio.create_task(self._stop_asked.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await cancel([stopping])
        if self._stop_asked.is_set():
            await cancel([starting])
            return False
        if (error := starting.exception()) is not None:
            _log.error("The engine could not be started: %s", error)
            return False
        return True

    def _log_ready(self) -> None:
        info = self._engine.info
        _log.info(
            "Ready: %s with %s, context window %d tokens, %d sequences at once, KV cache %d tokens",
            self._settings.served_name,
            info.name,
            info.context_window,
            info.max_sequences,
            info.kv_cache_tokens,
        )

    def _open_health(self) -> HealthServer | None:
        settings = self._settings
        if not settings.health_port:
            return None
        return HealthServer(
            settings.health_host,
            settings.health_port,
            is_healthy=lambda: (
                self._runner is None or self._runner.stalled_seconds < settings.stall_seconds
            ),
            is_ready=lambda: self._catalogue.is_announced_ready,
        )

    def _on_signal(self) -> None:
        if self._stop_asked.is_set():
            if self._runner is not None:
                self._runner.stop()
            return
        _log.info("Stopping")
        self._stop_asked.set()
        if self._runner is not None:
            self._draining = asyncio.create_task(self._drain(self._runner))

    async def _drain(self, runner: Runner) -> None:
        self._catalogue.draining()
        telemetry.READY.set(0)
        announced = asyncio.create_task(self._announce_once())
        await runner.drain(self._settings.drain_seconds)
        await announced

    async def _announce(self) -> None:
        await self._catalogue.announce()
        await asyncio.sleep(ANNOUNCE_SECONDS)

    async def _announce_once(self) -> None:
        # The loop that announces every second makes up for a failure.
        with contextlib.suppress(RedisError, OSError):
            await self._catalogue.announce()

    async def _withdraw(self) -> None:
        # Without this the card expires by itself after a few seconds.
        with contextlib.suppress(RedisError, OSError):
            await self._catalogue.withdraw()


def _settle_memory() -> None:
    """Spare the garbage collector what lives as long as the process, and make it look less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)

"""The worker process: startup, signals, shutdown order, and exit codes.

Exit codes: 0 after a signal, 1 if the first start of the engine fails. The worker restarts an
engine that dies.

The worker of a host ends with its standard input, and 2 is its code if its engine dies. The host
writes lines to that input: see `SLEEP`, `WAKE` and `LOADED`.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import uvloop
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.health import HealthServer
from common.logs import configure_logs, log_ready
from common.metrics import begin_metrics
from common.redis_url import describe
from common.tasks import end_task, in_background
from worker import telemetry
from worker.adapters.files import AdapterFiles
from worker.engine.adapters import adapter_limits
from worker.engine.base import Engine, EngineDeadError, EngineInfo
from worker.engine.exactness import WrongClassError
from worker.engine.scripted import Script, ScriptedEngine
from worker.engine.scripted_audio import CLIP_SECONDS
from worker.engine.scripted_chats import read_sessions
from worker.engine.scripted_pooling import scripted_pooling
from worker.execution import tracing
from worker.execution.canary import Canary
from worker.execution.runner import Runner
from worker.health import open_health
from worker.queue.heartbeat import WorkerHeartbeat
from worker.queue.link import Link
from worker.redis_client import connect
from worker.registration import ANNOUNCE_SECONDS, Registration
from worker.retries import repeat
from worker.settings import WorkerSettings
from worker.supervisor import EngineSupervisor

_log = logging.getLogger(__name__)

EXIT_STOPPED = 0
EXIT_NOT_STARTED = 1
EXIT_ENGINE_DIED = 2

SLEEP = b"sleep"
"""Drain, and put the engine to sleep; exit if it cannot sleep."""
WAKE = b"wake"
"""Wake the engine and claim jobs. Argument: service units that the first job's tenant is charged.
"""
LOADED = b"loaded"
"""Announce how long the host's swap to this worker took. Argument: the seconds."""
_INPUT_BYTES = 4_096


def run(settings: WorkerSettings) -> int:
    """Run a worker until a signal stops it. Return the exit code."""
    configure_logs(settings.log_format, level=settings.log_level)
    begin_metrics("worker")
    tracing.start(settings)
    try:
        return uvloop.run(serve(settings, partial(make_engine, settings)))
    finally:
        tracing.stop()


def make_engine(settings: WorkerSettings) -> Engine:
    """Return the engine selected by the settings, not started."""
    if settings.engine == "vllm":
        from worker.engine.vllm.engine import VllmEngine

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
        chat_template=settings.chat_template,
        sessions=[] if (file := settings.scripted_sessions) is None else read_sessions(file),
        adapters=adapter_limits(settings),
        can_sleep=settings.may_sleep,
        pooling=scripted_pooling(settings) if settings.runner == "pooling" else None,
        clip_seconds=CLIP_SECONDS if settings.runner == "transcription" else 0,
    )
    return ScriptedEngine(Path(settings.model_path), script)


async def serve(settings: WorkerSettings, make_engine: Callable[[], Engine]) -> int:
    """Run one worker. `make_engine` makes its engine, and a new one each time an engine dies."""
    async with connect(settings.redis_url.get_secret_value()) as redis:
        return await _Process(settings, make_engine, redis).run()


class _Process:
    """One worker process from start to exit."""

    def __init__(
        self, settings: WorkerSettings, make_engine: Callable[[], Engine], redis: Redis
    ) -> None:
        self._settings = settings
        self._link = Link(
            redis,
            settings.served_name,
            worker=settings.worker_id,
            lease_ms=settings.job_lease_ms,
            most_pending_deltas=settings.reply_buffer_deltas,
            chunk_cache_bytes=settings.chunk_cache_bytes,
        )
        self._heartbeat = WorkerHeartbeat(
            settings.redis_url.get_secret_value(),
            settings.served_name,
            settings.worker_id,
            lease_ms=settings.lease_ms,
        )
        self._catalogue = Registration(redis, self._link.queue, self._link.held, settings)
        self._adapter_files = AdapterFiles(
            settings.file_store, settings.adapter_folder, most_bytes=settings.adapter_folder_bytes
        )
        self._canary = self._make_canary()
        self._runner: Runner | None = None
        self._start_units = settings.start_units
        self._health: HealthServer | None = None
        self._stop_asked = asyncio.Event()
        self._wake_asked = asyncio.Event()
        self._supervisor = EngineSupervisor(
            make_engine,
            stopping=self._stop_asked,
            longest_pause_seconds=settings.restart_pause_seconds,
            on_failure=self._on_engine_failure,
            check=self._check_class,
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if self._settings.ends_with_input:
            loop.add_reader(sys.stdin.fileno(), self._on_input)
        self._health = self._open_health()
        announcing = asyncio.create_task(repeat("announce this worker", self._announce))
        linking = asyncio.create_task(self._link.run())
        try:
            serving = asyncio.create_task(self._load_and_serve())
            await asyncio.wait({serving, linking}, return_when=asyncio.FIRST_COMPLETED)
            if linking.done():
                await end_task(serving)
                await linking
            code = await serving
            # Not after an error: gateways then find this worker gone, with the jobs that it holds.
            await self._heartbeat.aclose()
            return code
        finally:
            telemetry.READY.set(0)
            if self._settings.ends_with_input:
                # The loop would take another file with this number for one that it watches already.
                loop.remove_reader(sys.stdin.fileno())
            await end_task(announcing, linking)
            await self._withdraw()
            await self._supervisor.aclose()
            await self._link.aclose()
            self._close_health()
            _log.info("Stopped")

    def _make_canary(self) -> Canary | None:
        settings = self._settings
        is_chosen = settings.engine == "vllm" or "canary_seconds" in settings.model_fields_set
        if not (is_chosen and settings.canary_seconds and settings.runner == "generate"):
            return None
        return Canary(
            self._link.redis,
            settings.served_name,
            interval_seconds=settings.canary_seconds,
            on_result=self._catalogue.canary_compared,
        )

    async def _load_and_serve(self) -> int:
        _log.info(
            "Loading model %s from %s (about half a minute on a CPU)",
            self._settings.served_name,
            self._settings.model_path,
        )
        try:
            engine = await self._supervisor.start()
        except Exception as error:  # Engines raise anything.
            _log.error("The engine could not be started: %s", error)
            return EXIT_NOT_STARTED
        # Not before: loading libraries may block all threads for longer than a lease.
        self._heartbeat.start()
        while engine is not None:
            failure = await self._serve(engine)
            if failure is None:
                break
            if self._settings.ends_with_input:
                # Its host starts another worker, which may be of another model.
                _log.error("%s", failure)
                return EXIT_ENGINE_DIED
            engine = await self._supervisor.restart(failure)
        return EXIT_STOPPED

    async def _serve(self, engine: Engine) -> str | None:
        """Run jobs until shutdown or a failure. Return the cause for which to restart the engine.

        While the host has put the engine to sleep, wait. An engine that cannot sleep is shut down.
        """
        try:
            while not self._stop_asked.is_set():
                runner = await self._run_jobs(engine)
                if self._stop_asked.is_set() or not engine.info.can_sleep:
                    break
                await self._sleep(engine, runner)
        except EngineDeadError as error:
            return f"The engine died: {error}"
        except Exception as error:
            _log.exception("The worker failed")
            return f"The worker failed: {type(error).__name__}"
        return None

    async def _run_jobs(self, engine: Engine) -> Runner:
        """Run jobs until shutdown, or until the engine shall sleep. Return the runner, stopped.

        Raises EngineDeadError.
        """
        runner = self._runner = Runner(
            self._link,
            engine,
            gather_seconds=self._settings.gather_seconds,
            stall_seconds=self._settings.stall_seconds,
            preempted_share=self._settings.preempted_share,
            affinity_seconds=self._settings.affinity_seconds,
            adapter_files=self._adapter_files,
            adapter_load_units=self._settings.adapter_load_units,
            start_units=self._take_start_units(),
            on_adapters_changed=self._catalogue.adapters_changed,
            canary=self._canary,
        )
        _settle_memory()
        telemetry.READY.set(1)
        telemetry.MAX_SEQUENCES.set(engine.info.max_sequences)
        self._catalogue.engine_started(engine.info)
        self._log_ready(engine.info)
        announced = asyncio.create_task(self._announce_once())
        try:
            await runner.run()
        finally:
            self._runner = None
            telemetry.READY.set(0)
            telemetry.MAX_SEQUENCES.set(0)
            await end_task(announced)
        return runner

    async def _sleep(self, engine: Engine, runner: Runner) -> None:
        """Keep the engine asleep until the host wakes it, or until shutdown.

        Raises EngineDeadError.
        """
        self._wake_asked.clear()
        await self._within_stall(runner.sleep(), "fall asleep")
        # The worker that the host runs meanwhile has the same port.
        await asyncio.to_thread(self._close_health)
        self._catalogue.sleeping()
        await self._announce_once()
        _log.info("Sleeping")
        endings = (self._wake_asked.wait(), self._stop_asked.wait(), _until_dead(engine))
        tasks = [asyncio.create_task(each) for each in endings]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end_task(*tasks)
        if not self._stop_asked.is_set():
            await self._within_stall(engine.wake(), "wake up")
            telemetry.begin_again()
            self._health = self._open_health()

    async def _within_stall(self, action: Awaitable[None], what: str) -> None:
        """Wait for an action of the engine. Raises EngineDeadError, also if it takes too long."""
        seconds = self._settings.stall_seconds
        try:
            await asyncio.wait_for(action, seconds)
        except TimeoutError:
            raise EngineDeadError(f"it did not {what} within {seconds:g} s") from None

    def _take_start_units(self) -> float:
        """Return what a tenant is charged for the start; 0 for a later start of the engine."""
        units, self._start_units = self._start_units, 0.0
        return units

    def _check_class(self, info: EngineInfo) -> None:
        """Refuse an engine of another class than the pool's. Raises WrongClassError."""
        required = self._settings.required_class
        if required not in ("", info.exactness.digest):
            raise WrongClassError(info.exactness, required)

    def _on_engine_failure(self, failure: str) -> None:
        _log.error("%s", failure)
        if not self._stop_asked.is_set():
            self._catalogue.engine_failed(failure)
            in_background(self._announce_once())

    def _log_ready(self, info: EngineInfo) -> None:
        settings = self._settings
        log_ready(
            "sluice worker",
            f"{settings.served_name} with {info.name}",
            f"context window {info.context_window} tokens",
            f"{info.max_sequences} sequences at once",
            f"KV cache {info.kv_cache_tokens} tokens",
            f"exactness class {info.exactness.digest}",
            describe(self._link.redis),
            f"checks at http://{settings.health_host}:{settings.health_port}"
            if settings.health_port
            else "no port for checks",
        )

    def _open_health(self) -> HealthServer | None:
        settings = self._settings
        return open_health(
            settings.health_host,
            settings.health_port,
            {
                # Fails if the process should be restarted.
                "/healthz": lambda: self._supervisor.down_seconds < settings.restart_seconds,
                # Fails while the worker claims no jobs.
                "/readyz": lambda: self._catalogue.is_announced_ready,
            },
        )

    def _on_signal(self) -> None:
        if self._stop_asked.is_set():
            if self._runner is not None:
                self._runner.stop()
            return
        _log.info("Stopping")
        self._stop_asked.set()
        if self._runner is not None:
            in_background(self._drain(self._runner))

    def _close_health(self) -> None:
        health, self._health = self._health, None
        if health is not None:
            health.close()

    def _on_input(self) -> None:
        """Obey the host, or return all jobs and exit if it has ended."""
        descriptor = sys.stdin.fileno()
        if lines := os.read(descriptor, _INPUT_BYTES):
            # A short write to a pipe is never divided.
            for line in lines.splitlines():
                self._obey(*line.split())
            return
        asyncio.get_running_loop().remove_reader(descriptor)
        _log.error("Standard input has ended")
        self._on_signal()
        if self._runner is not None:
            # Without a drain: the next host of this machine needs the memory.
            self._runner.stop()

    def _obey(self, command: bytes, argument: bytes = b"") -> None:
        if command == LOADED:
            self._catalogue.loaded(float(argument))
        elif command == WAKE:
            self._start_units = float(argument)
            self._wake_asked.set()
        elif command == SLEEP and self._runner is not None and not self._stop_asked.is_set():
            in_background(self._drain(self._runner))

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
        # The periodic announcement repeats it after a failure.
        with contextlib.suppress(RedisError, OSError):
            await self._catalogue.announce()

    async def _withdraw(self) -> None:
        # If this fails, the card expires after a few seconds.
        with contextlib.suppress(RedisError, OSError):
            await self._catalogue.withdraw()


async def _until_dead(engine: Engine) -> None:
    """Wait while an engine sleeps, in which it makes no steps. Raises EngineDeadError."""
    while True:
        await engine.step()


def _settle_memory() -> None:
    """Exclude long-lived objects from garbage collection and make it less frequent."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)

"""The host process: it serves one model at a time, and swaps to another model.

A swap drains the worker: jobs that do not finish in its drain time are given back with their
tokens, and resume when a worker of their model claims them. Then the worker stops, or its engine
sleeps, and the worker of the other model starts or wakes. The workers announce that waiting jobs
start them, so that gateways accept requests for models that sleep.
"""

import asyncio
import contextlib
import json
import logging
import signal
import time
from collections.abc import Mapping
from typing import NamedTuple

import uvloop
from prometheus_client import Counter, Gauge, Histogram
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.logs import configure_logs
from common.metrics import begin_metrics
from common.tasks import Backoff, end_task, unless
from contract import keys
from contract.messages import WorkerState
from contract.queue import JobQueue, ModelStatus
from worker.health import open_health
from worker.hosting.process import HostedWorker, read_card
from worker.hosting.settings import HostedModel, HostSettings, read_models
from worker.main import EXIT_STOPPED
from worker.redis_client import connect
from worker.retries import repeat
from worker.settings import default_worker_id

_log = logging.getLogger(__name__)

SWAPS = Counter("sluice_host_swaps", "Swaps from another model to this one.", ["model"])
START_SECONDS = Histogram(
    "sluice_host_start_seconds",
    "Time from the decision to serve a model until its worker claims jobs, drain included. The "
    "worker was started (from disk) or woken (from sleep).",
    ["model", "source"],
    buckets=(1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600),
)
FAILURES = Counter(
    "sluice_host_worker_exits",
    "Workers that exited although the host did not stop them.",
    ["model"],
)
SERVED = Gauge("sluice_host_serves", "1 for the model whose worker runs or starts.", ["model"])


def _serves(model: str | None) -> None:
    """Record the model whose worker runs; None if none runs."""
    SERVED.clear()
    if model is not None:
        SERVED.labels(model).set(1)


LOOK_SECONDS = 0.5
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_FIRST_START_SECONDS = 120.0
"""Assumed duration of the first start of a model. Other hosts wait up to twice the duration."""
_TURN_MS = 5_000
"""Time after which another host may start the model of a host that was killed."""
_RENEW_SECONDS = 1.0


class Hysteresis(NamedTuple):
    """How long a host keeps a model before it swaps."""

    least_seconds: float
    """Time for which a model with jobs is served, from when its worker is ready."""
    ratio: float
    """A model with jobs is left for one that has this many times as many jobs for each worker."""
    longest_wait_seconds: float
    """Wait of a job for a model without a worker after which its model is served in any case."""


def choose(
    current: str | None,
    statuses: Mapping[str, ModelStatus],
    *,
    served_seconds: float,
    hysteresis: Hysteresis,
) -> str | None:
    """Return the model to swap to; None to keep the current one.

    Requests go before batch jobs: a model for which only batch jobs wait is served if no request
    waits for another model, and the current one is idle.
    """
    own = None if current is None else statuses[current]
    others = {name: status for name, status in statuses.items() if name != current}
    wanted = {name: status for name, status in others.items() if status.waiting_jobs}
    if not wanted:
        batches = {name: each.waiting_batch_jobs for name, each in others.items()}
        most = max(batches, key=batches.__getitem__, default=None)
        is_free = own is None or not (own.waiting_batch_jobs or _is_used(own))
        return most if most is not None and batches[most] and is_free else None
    most_wanted = max(wanted, key=lambda name: _load(wanted[name], joining=1))
    if own is None or not _is_used(own):
        return most_wanted
    if served_seconds < hysteresis.least_seconds:
        return None
    if _load(wanted[most_wanted], joining=1) > hysteresis.ratio * _load(own):
        return most_wanted
    waits = {
        name: each.oldest_wait_seconds for name, each in wanted.items() if not each.ready_workers
    }
    longest = max(waits, key=waits.__getitem__, default=None)
    is_late = longest is not None and waits[longest] > hysteresis.longest_wait_seconds
    return longest if is_late else None


def _load(status: ModelStatus, *, joining: int = 0) -> float:
    """Return the waiting jobs for each worker, counting those that join."""
    return status.waiting_jobs / max(status.ready_workers + joining, 1)


def _is_used(status: ModelStatus) -> bool:
    """Whether requests wait, or jobs run that only this host may be running."""
    return bool(status.waiting_jobs or (status.leased_jobs and status.ready_workers <= 1))


def run(settings: HostSettings) -> int:
    """Run a host until a signal stops it. Return the exit code."""
    configure_logs(settings.log_format, level=settings.log_level)
    begin_metrics("host")
    models = read_models(settings.models)
    return uvloop.run(_serve(settings, models))


async def _serve(settings: HostSettings, models: Mapping[str, HostedModel]) -> int:
    async with connect(settings.redis_url.get_secret_value()) as redis:
        return await Host(settings, models, redis).run()


class Host:
    """The models of a host, the worker process of the one that it serves, and sleeping ones."""

    def __init__(
        self, settings: HostSettings, models: Mapping[str, HostedModel], redis: Redis
    ) -> None:
        self._settings = settings
        self._models = models
        self._redis = redis
        self._id = default_worker_id()
        self._queues = {name: JobQueue(redis, name) for name in models}
        self._hysteresis = Hysteresis(
            settings.least_seconds, settings.ratio, settings.longest_wait_seconds
        )
        self._stop_asked = asyncio.Event()
        self._backoffs = {
            name: Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS) for name in models
        }
        self._measured_seconds: dict[tuple[str, bool], float] = {}
        """Seconds that the last swap to each model took, by whether its worker was asleep."""
        self._retry_at = dict.fromkeys(models, 0.0)
        """When a model whose worker has exited may be started again; 0 if none has."""
        self._turn: asyncio.Task[None] | None = None
        """Keeps other hosts from starting the model that this one starts."""
        self._starts = 0
        self._model: str | None = None
        """The model whose worker runs or starts. All other workers sleep."""
        self._workers: dict[str, HostedWorker] = {}
        """By model, the least recently served one first."""
        self._ready_at: float | None = None
        """When the worker was first seen to claim jobs."""
        self._began_at = 0.0
        self._is_woken = False
        """Whether its engine slept before."""

    async def run(self) -> int:
        """Serve models until a signal arrives."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        settings = self._settings
        health = open_health(
            settings.health_host,
            settings.health_port,
            {"/healthz": lambda: True, "/readyz": lambda: self._ready_at is not None},
        )
        try:
            await unless(self._stop_asked, repeat("serve the models of this host", self._step))
            return EXIT_STOPPED
        finally:
            stops = (each.stop() for each in self._workers.values())
            await asyncio.gather(*stops, return_exceptions=True)
            await self._end_turn()
            if health is not None:
                health.close()

    def _on_signal(self) -> None:
        if self._stop_asked.is_set():
            # The worker gives its jobs back at once.
            for worker in self._workers.values():
                worker.terminate()
        self._stop_asked.set()

    # -- one look at the queues ------------------------------------------------------------------

    async def _step(self) -> None:
        await self._check_worker()
        for model in await self._choose():
            if await self._take_turn(model):
                try:
                    await self._swap(model)
                except Exception:
                    FAILURES.labels(model).inc()
                    await self._start_failed(model)
                    raise
                break
        await asyncio.sleep(LOOK_SECONDS)

    async def _known_models(self) -> set[str]:
        """Return the models whose requests gateways accept while they sleep."""
        cards = map(read_card, await self._redis.hmget(keys.MODELS, list(self._queues)))
        return {
            card.model
            for card in cards
            # A worker whose first start failed leaves a card that is not ready.
            if card is not None and card.scales_to_zero and card.state is WorkerState.READY
        }

    async def _check_worker(self) -> None:
        """Note that the worker has become ready, or that it has exited."""
        self._drop_exited()
        model, now = self._model, time.monotonic()
        if model is None:
            return
        worker = self._workers.get(model)
        if worker is None:
            await self._start_failed(model)
        elif self._ready_at is None and await worker.is_ready():
            seconds = now - self._began_at
            self._ready_at = now
            self._measured_seconds[model, self._is_woken] = seconds
            self._backoffs[model].reset()
            await self._end_turn()
            worker.loaded(seconds)
            source = "sleep" if self._is_woken else "disk"
            START_SECONDS.labels(model, source).observe(seconds)
            _log.info("Serving %s after %.1f s", model, seconds)

    async def _start_failed(self, model: str) -> None:
        """Note that a worker has exited or could not be started; others of its model may be."""
        self._retry_at[model] = time.monotonic() + self._backoffs[model].next_seconds()
        if (current := self._workers.get(self._model or "")) is not None:
            # It was to leave its place, and is in no known state.
            current.terminate()
        else:
            self._model = self._ready_at = None
            _serves(None)
        await self._end_turn()

    async def _choose(self) -> list[str]:
        """Return the models to swap to, the best one first; none to keep the current one."""
        if self._model is not None and self._ready_at is None:
            return []
        now = time.monotonic()
        usable = [name for name, at in self._retry_at.items() if at <= now]
        # Gateways accept no request for a model before its first worker has announced it.
        known = await self._known_models()
        unknown = [name for name in usable if name not in known and name != self._model]
        if first_starts := [name for name in unknown if not self._retry_at[name]]:
            return first_starts
        found = await asyncio.gather(*(self._queues[name].status() for name in usable))
        statuses = dict(zip(usable, found, strict=True))
        served_seconds = 0.0 if self._ready_at is None else now - self._ready_at
        chosen = choose(
            self._model, statuses, served_seconds=served_seconds, hysteresis=self._hysteresis
        )
        if chosen is not None:
            return [chosen]
        if self._model is None:
            return usable
        # A start that has failed may fail again, so it interrupts no jobs.
        own = statuses[self._model]
        return [] if own.waiting_jobs or own.waiting_batch_jobs or own.leased_jobs else unknown

    async def _take_turn(self, model: str) -> bool:
        """Return whether this host may start a model: hosts start it one after the other."""
        key = keys.host_start(model)
        if not await self._redis.set(key, self._id, nx=True, px=_TURN_MS):
            return False
        self._turn = asyncio.create_task(self._keep_turn(key, model))
        return True

    async def _keep_turn(self, key: str, model: str) -> None:
        """Let no other host start a model, until its start has taken too long."""

        async def renew() -> None:
            await self._redis.set(key, self._id, px=_TURN_MS)
            await asyncio.sleep(_RENEW_SECONDS)

        try:
            seconds = self._measured_seconds.get((model, False), _FIRST_START_SECONDS)
            async with asyncio.timeout(2 * seconds):
                await repeat("keep the turn to start a model", renew)
        finally:
            # If this fails, the key expires after a few seconds.
            with contextlib.suppress(RedisError, OSError):
                await self._redis.delete(key)

    async def _end_turn(self) -> None:
        """Let other hosts start the model that this host has started."""
        turn, self._turn = self._turn, None
        if turn is not None:
            await end_task(turn)

    async def _swap(self, model: str) -> None:
        before, self._ready_at = self._model, None
        self._began_at = time.monotonic()
        if before is not None:
            _log.info("Swapping from %s to %s", before, model)
            SWAPS.labels(model).inc()
            await self._free_device(before, wanted=model)
            self._drop_exited()
        self._model = model
        _serves(model)
        self._is_woken = model in self._workers
        seconds = self._measured_seconds.get((model, self._is_woken), 0.0) if before else 0.0
        units = seconds * self._settings.swap_units
        if self._is_woken:
            worker = self._workers[model] = self._workers.pop(model)
            worker.wake(units=units)
        else:
            self._workers[model] = await self._start_worker(model, units=units)

    # -- the worker processes --------------------------------------------------------------------

    async def _free_device(self, model: str, *, wanted: str) -> None:
        """Put the worker of a model to sleep, or stop it, so that the wanted one gets its place.

        First, stop the sleeping workers that were not served for longest, if there are too many.
        """
        most = self._settings.sleeping_models
        if most:
            others = [each for name, each in self._workers.items() if name not in (model, wanted)]
            for each in others[: max(len(others) + 1 - most, 0)]:
                _log.info("Stopping the sleeping worker of %s", each.model)
                await self._stop_worker(each)
        worker = self._workers[model]
        if most and await worker.sleep():
            return
        if most:
            _log.warning("The worker of %s exited, code %s: no sleep", model, worker.exit_code)
        await self._stop_worker(worker)

    async def _start_worker(self, model: str, *, units: float) -> HostedWorker:
        self._starts += 1
        environment = {
            **self._models[model].environment,
            "SLUICE_REDIS_URL": self._settings.redis_url.get_secret_value(),
            "SLUICE_START_UNITS": str(units),
            "SLUICE_MAY_SLEEP": json.dumps(bool(self._settings.sleeping_models)),
        }
        worker = f"{self._id}-{self._starts}"
        return await HostedWorker.start(
            model,
            worker,
            environment,
            self._redis,
            longest_seconds=self._models[model].longest_seconds,
        )

    async def _stop_worker(self, worker: HostedWorker) -> None:
        await worker.stop()
        del self._workers[worker.model]

    def _drop_exited(self) -> None:
        """Report and drop the workers that have exited."""
        for model, worker in list(self._workers.items()):
            if worker.exit_code is not None:
                _log.error("The worker of %s exited: %d", model, worker.exit_code)
                FAILURES.labels(model).inc()
                del self._workers[model]

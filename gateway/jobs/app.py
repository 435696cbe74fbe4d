"""Celery application: its scheduler puts runs into queues, and its worker starts them.

Celery is bound to a minor version: the subclasses of `Consumer` and `Scheduler` override methods
that are not documented.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Never
from urllib.parse import quote, urlsplit

import redis
from celery import Celery
from celery.beat import Scheduler, SchedulingError
from celery.signals import setup_logging, worker_ready
from celery.worker.consumer import Consumer
from redis.backoff import NoBackoff
from redis.retry import Retry
from typing_extensions import override

from common.redis_url import (
    SentinelAddress,
    blocking_redis_client,
    cluster_address,
    sentinel_address,
    server_options,
)
from gateway.jobs import telemetry
from gateway.jobs.runner import TrackRunner
from gateway.jobs.schedule import TASKS, Task, Track
from gateway.platform.settings import Settings
from gateway.platform.store_errors import cause_of
from gateway.records.errors import StartupError

START: Final = "sluice.start"
"""Name of the Celery task. Its arguments are names of jobs: each message takes CPU time."""
MOST_WAITING: Final = 200
"""Limit of waiting runs of a track: no more are queued while workers do not take them."""
BROKER_SECONDS: Final = 5.0
"""Timeout of the broker, and interval of its health checks."""
SENTINEL_SECONDS: Final = 1.0
"""Timeout of a sentinel before the next one is tried."""
FULL_SECONDS: Final = 1.0
"""Pause before a full broker is tried again."""
RECONNECT_SECONDS: Final = 20.0
"""A consumer that has taken no run for this long, although some wait, connects again."""
CHECK_SECONDS: Final = 5.0
"""Interval at which the consumer checks that."""
SILENT_SECONDS: Final = 60.0
"""After this long without a tick, or without a run while some wait, a process counts as stuck."""

logger = logging.getLogger(__name__)


def create_app(settings: Settings) -> Celery:
    """Return the application with its broker and schedule. It uses this process's logging.

    Raises StartupError if the broker would be a Redis Cluster.
    """
    setup_logging.connect(_leave_logs_alone)
    url = settings.celery_broker_url or settings.redis_url
    if cluster_address(url) is not None:
        raise StartupError(
            "Celery cannot use a Redis Cluster. Set SLUICE_CELERY_BROKER_URL to a Redis server, or "
            "to a master that sentinels name."
        )
    sentinels = sentinel_address(url)
    broker, tls = (_sentinel_urls(sentinels), {}) if sentinels is not None else _server(url)
    app = Celery("sluice", broker=broker)
    app.conf.update(
        broker_use_ssl=tls,
        task_default_queue=Track.LEDGER,
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        timezone="UTC",
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # A full Redis must not end the process.
        broker_channel_error_retry=True,
        worker_consumer=PatientConsumer,
        broker_transport_options={
            # Celery only logs an acknowledgement that fails. The run would count as unfinished
            # forever, and a consumer with as many of these as cores takes no other run.
            "ack_emulation": False,
            "socket_keepalive": True,
            # Without these, a hanging broker blocks forever, even if sentinels have a new master.
            "socket_timeout": BROKER_SECONDS,
            "health_check_interval": BROKER_SECONDS,
            **({} if sentinels is None else _sentinel_options(sentinels)),
        },
        beat_max_loop_interval=1,
        beat_schedule=_messages(),
        sluice_broker=url,
    )
    return app


class Intake:
    """When this process last took a run of its tracks from the broker, and whether others wait."""

    def __init__(self, app: Celery, tracks: Iterable[Track]) -> None:
        self._broker = blocking_redis_client(
            app.conf.sluice_broker,
            socket_timeout=BROKER_SECONDS,
            retry=Retry(NoBackoff(), 0),  # The consumer waits for the answer.
        )
        self._tracks = tuple(tracks)
        self.taken_at = time.monotonic()

    def is_stuck(self, seconds: float) -> bool:
        """Whether runs wait that this process does not take, as it has taken none for so long.

        A process that can reach no broker, or has nothing to do, is not stuck.
        """
        if time.monotonic() - self.taken_at < seconds:
            return False
        try:
            return any(self._broker.llen(track) for track in self._tracks)
        except (redis.RedisError, OSError):
            return False


def run_worker(
    app: Celery,
    runners: Mapping[Track, TrackRunner],
    intake: Intake,
    on_ready: Callable[[], None],
) -> int:
    """Start due jobs of these tracks until SIGTERM or SIGINT. Return the exit status.

    `on_ready` is called when runs are taken from the broker.

    The only thread of the pool starts a job without waiting for it, so that no run delays another.
    """

    def start(*names: str) -> None:
        intake.taken_at = time.monotonic()
        for task in TASKS:
            if task.name in names:
                runners[task.track].start(task)

    app.task(start, name=START, shared=False)
    app.conf.sluice_intake = intake
    worker = app.Worker(
        pool="solo",
        queues=[track.value for track in runners],
        loglevel="WARNING",
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    worker_ready.connect(lambda **_details: on_ready(), weak=False)
    worker.start()
    return int(worker.exitcode or 0)


class SchedulerTick:
    """The time of the scheduler's last tick."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def is_recent(self) -> bool:
        """Whether the last tick was recent."""
        return time.monotonic() - self.at < SILENT_SECONDS


def run_beat(app: Celery, heartbeat: SchedulerTick, on_ready: Callable[[], None]) -> Never:
    """Send due jobs to workers until a signal ends the process.

    `on_ready` is called when the broker has taken the first run.
    """
    scheduler = BoundedScheduler(app)
    is_ready = False
    while True:
        heartbeat.at = time.monotonic()
        pause = scheduler.tick()
        if scheduler.has_sent and not is_ready:
            is_ready = True
            on_ready()
        time.sleep(pause)


class PatientConsumer(Consumer):  # type: ignore[misc]
    """Takes runs from the broker, and connects again if it takes none although some wait.

    Waits while a full Redis rejects writes, and logs that once.
    """

    _is_full = False

    @override
    def register_with_event_loop(self, hub: Any) -> None:
        super().register_with_event_loop(hub)
        self._is_full = False
        hub.call_repeatedly(CHECK_SECONDS, self._check)

    def _check(self) -> None:
        intake: Intake = self.app.conf.sluice_intake
        if intake.is_stuck(RECONNECT_SECONDS):
            intake.taken_at = time.monotonic()
            # The event loop ends with this error, as with one of the connection.
            raise redis.ConnectionError(f"no run taken for {RECONNECT_SECONDS:.0f} s")

    @override
    def on_connection_error_before_connected(self, exc: Exception) -> None:
        if not isinstance(exc, redis.exceptions.OutOfMemoryError):
            super().on_connection_error_before_connected(exc)
            return
        if not self._is_full:
            logger.warning("the broker rejects writes: %s", type(exc).__name__)
        self._is_full = True
        time.sleep(FULL_SECONDS)


class BoundedScheduler(Scheduler):  # type: ignore[misc]
    """Keeps its schedule in memory, and skips runs while too many are waiting."""

    def __init__(self, app: Celery, **options: Any) -> None:
        self._broker = blocking_redis_client(app.conf.sluice_broker, socket_timeout=BROKER_SECONDS)
        self._problem = ""
        """The last one that was logged, until the broker takes a run."""
        self.has_sent = False
        """Whether the broker has taken a run."""
        super().__init__(app, **options)

    @override
    def adjust(self, n: float, drift: float = 0.0) -> float:
        """Return the delay unchanged: with Celery's drift, it polls for 10 ms before each run."""
        return n + drift

    @override
    def apply_async(self, entry: Any, **options: Any) -> Any:
        try:
            waiting: Any = self._broker.llen(track := entry.options["queue"])
            telemetry.WAITING_RUNS.labels(track).set(waiting)
            sent = super().apply_async(entry, **options) if waiting < MOST_WAITING else None
        except (redis.RedisError, SchedulingError) as error:
            is_full = isinstance(error, SchedulingError)
            problem = "rejects writes" if is_full else "cannot be reached"
            if problem != self._problem:
                logger.warning("the broker %s: %s", problem, cause_of(error))
            self._problem = problem
            telemetry.WAITING_RUNS.clear()
            return None
        self._problem, self.has_sent = "", True
        return sent


def _leave_logs_alone(**_details: object) -> None:
    """Receive Celery's logging signal, which keeps Celery from configuring logging itself."""


def _server(url: str) -> tuple[str, dict[str, Any]]:
    """Return a URL without options, and the arguments for TLS.

    Celery would read options differently from redis-py, and without any verifies no certificate.
    """
    options = server_options(url)
    plain = urlsplit(url)._replace(path=f"/{options.pop('db')}", query="")
    return plain.geturl(), options


def _sentinel_urls(address: SentinelAddress) -> str:
    """Return a URL for each sentinel; Celery tries the next one if one does not respond."""
    credentials = ""
    if address.password is not None:
        credentials = (
            f"{quote(address.username or '', safe='')}:{quote(address.password, safe='')}@"
        )
    return ";".join(
        f"sentinel://{credentials}{f'[{host}]' if ':' in host else host}:{port}/{address.database}"
        for host, port in address.hosts
    )


def _sentinel_options(address: SentinelAddress) -> dict[str, Any]:
    return {
        "master_name": address.service,
        "sentinel_kwargs": {**address.sentinel_options, "socket_timeout": SENTINEL_SECONDS},
    }


def _messages() -> dict[str, dict[str, Any]]:
    """Return the messages by their jobs: one for those of a track that have one schedule."""
    jobs: dict[tuple[Track, str], list[Task]] = {}
    for task in TASKS:
        jobs.setdefault((task.track, str(task.schedule)), []).append(task)
    return {
        " ".join(task.name for task in tasks): {
            "task": START,
            "args": [task.name for task in tasks],
            "schedule": tasks[0].schedule,
            "options": {"expires": tasks[0].expires_seconds, "queue": track.value},
        }
        for (track, _), tasks in jobs.items()
    }

"""`sluice jobs`, the Celery worker for background jobs, and `sluice beat`, which schedules them."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Never

import click
from prometheus_client import REGISTRY, CollectorRegistry

from common.health import HealthServer
from common.logs import configure_logs, log_ready
from common.metrics import bare_registry, begin_metrics
from common.redis_url import describe
from gateway.cli.terminal import DATABASE, choice, option
from gateway.platform.database.engine import create_engine
from gateway.platform.database.engine import describe as describe_url
from gateway.platform.database.schema import check_schema
from gateway.platform.redis_client import connect
from gateway.platform.settings import Settings, load_settings
from gateway.records.errors import StartupError

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def serving_health(
    settings: Settings,
    is_healthy: Callable[[], bool],
    *,
    registry: CollectorRegistry = REGISTRY,
) -> Iterator[None]:
    """Serve /metrics and /healthz within a block, if the settings name a port.

    SIGTERM and SIGINT exit the process with status 0 until Celery installs its own handlers. Raises
    StartupError if another process listens on the port.
    """
    before = {number: signal.signal(number, _exit_at_once) for number in SIGNALS}
    try:
        port = settings.metrics_port
        with closing(_serve(settings, is_healthy, registry)) if port else nullcontext():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(
    settings: Settings, is_healthy: Callable[[], bool], registry: CollectorRegistry
) -> HealthServer:
    try:
        return HealthServer(
            settings.metrics_host,
            settings.metrics_port,
            {"/healthz": is_healthy},
            registry=registry,
        )
    except OSError as error:
        raise StartupError(
            f"SLUICE_METRICS_PORT: cannot listen on {settings.metrics_host}:"
            f"{settings.metrics_port} ({error.strerror})."
        ) from error


def _exit_at_once(*_: Any) -> Never:
    """Handle a signal when there is nothing to finish.

    SystemExit could be raised anywhere, even in an import, where Python replaces it with other
    errors.
    """
    os._exit(0)


JOBS_EPILOG = """\
\b
Examples:
  sluice jobs
  sluice jobs --redis-url redis://redis.internal:6379/0
  sluice jobs --track ledger

Background jobs write usage to the ledger and sum it, settle requests of dead gateways, expire keys
and credits, sign the audit log, and send webhooks. `sluice beat` schedules them. Any number of
`sluice jobs` may run; gateways serve requests without them. The track `ledger` moves money, and the
track `long` does the rest. Each setting is also an environment variable SLUICE_*.
"""
BEAT_EPILOG = """\
\b
Example:
  sluice beat --redis-url redis://redis.internal:6379/0

One scheduler is enough; a second one does no harm. Each setting is also an environment variable
SLUICE_*.
"""
_REDIS: Final = option("--redis-url URL", "Redis server that gateways share.  [SLUICE_REDIS_URL]")
_TRACK: Final = choice("--track", ("ledger", "long"), "Run only the jobs of this track.")


@click.command("jobs", epilog=JOBS_EPILOG, params=[DATABASE, _REDIS, _TRACK])
def command(track: str | None, **urls: str | None) -> None:
    """Run background jobs until SIGTERM or Ctrl-C, and finish running ones first."""
    settings = load_settings(**urls)
    asyncio.run(check_schema(settings.database_url.get_secret_value()))
    from gateway.jobs.app import SILENT_SECONDS, Intake, create_app, run_worker
    from gateway.jobs.runner import running, stop_all
    from gateway.jobs.schedule import DRAIN, Track

    configure_logs(settings.log_format, level=logging.WARNING)
    app = create_app(settings)
    begin_metrics("jobs")
    with ExitStack() as stack:
        tracks = list(Track) if track is None else [Track[track.upper()]]
        runners = {each: stack.enter_context(running(settings, each)) for each in tracks}

        intake = Intake(app, tracks)

        def is_working() -> bool:
            responsive = all(runner.is_responsive() for runner in runners.values())
            return responsive and not intake.is_stuck(SILENT_SECONDS)

        stack.enter_context(serving_health(settings, is_working))
        engine = create_engine(settings.database_url.get_secret_value(), None)
        tracks_ = f"tracks {', '.join(each.name.lower() for each in tracks)}"
        facts = (tracks_, *_facts(settings), describe_url(engine.url))
        status = run_worker(app, runners, intake, partial(log_ready, "sluice jobs", *facts))
        stop_all(runners.values())
        if Track.LEDGER in runners:
            # Drain the settlements of stopped gateways, so that none stay in Redis.
            runners[Track.LEDGER].run(DRAIN)
    sys.exit(status)


@click.command("beat", epilog=BEAT_EPILOG, params=[_REDIS])
def beat(redis_url: str | None) -> None:
    """Schedule background jobs until SIGTERM or Ctrl-C."""
    settings = load_settings(redis_url=redis_url)
    from gateway.jobs import telemetry
    from gateway.jobs.app import SchedulerTick, create_app, run_beat

    configure_logs(settings.log_format, level=logging.WARNING)
    app = create_app(settings)
    begin_metrics("beat")
    heartbeat = SchedulerTick()
    # The jobs are imported for their schedules; this process runs none of them.
    registry = bare_registry()
    registry.register(telemetry.WAITING_RUNS)
    with serving_health(settings, heartbeat.is_recent, registry=registry):
        run_beat(app, heartbeat, partial(log_ready, "sluice beat", *_facts(settings)))


def _facts(settings: Settings) -> Iterator[str]:
    """Yield the addresses of the process and its stores, without passwords."""
    port = settings.metrics_port
    yield f"checks at http://{settings.metrics_host}:{port}" if port else "no port for checks"
    yield describe(connect(settings.redis_url, max_connections=1))
    if (broker := settings.celery_broker_url) is not None:
        yield f"broker: {describe(connect(broker, max_connections=1))}"

"""`sluice jobs`: Celery worker for background jobs."""

import asyncio
import logging
import sys
from contextlib import ExitStack

import click

from common.logs import configure_logs
from common.metrics import begin_metrics
from gateway.cli.health import serving_health
from gateway.cli.terminal.options import DATABASE
from gateway.platform.database.schema import check_schema
from gateway.platform.settings import load_settings

EPILOG = """\
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


@click.command("jobs", epilog=EPILOG, params=[DATABASE])
@click.option(
    "--redis-url", metavar="URL", help="Redis server that gateways share.  [SLUICE_REDIS_URL]"
)
@click.option(
    "--track", type=click.Choice(["ledger", "long"]), help="Run only the jobs of this track."
)
def command(redis_url: str | None, database_url: str | None, track: str | None) -> None:
    """Run background jobs until SIGTERM or Ctrl-C, and finish running ones first."""
    settings = load_settings(redis_url=redis_url, database_url=database_url)
    asyncio.run(check_schema(settings.database_url.get_secret_value()))
    from gateway.jobs.app import create_app, run_worker
    from gateway.jobs.runner import running, stop_all
    from gateway.jobs.schedule import DRAIN, Track

    configure_logs(settings.log_format, level=logging.WARNING)
    begin_metrics("jobs")
    with ExitStack() as stack:
        tracks = list(Track) if track is None else [Track[track.upper()]]
        runners = {each: stack.enter_context(running(settings, each)) for each in tracks}

        def are_responsive() -> bool:
            return all(runner.is_responsive() for runner in runners.values())

        stack.enter_context(serving_health(settings, are_responsive))
        status = run_worker(create_app(settings), runners)
        stop_all(runners.values())
        if Track.LEDGER in runners:
            # Drain the settlements of stopped gateways, so that none stay in Redis.
            runners[Track.LEDGER].run(DRAIN)
    sys.exit(status)

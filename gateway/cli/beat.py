"""`sluice beat`: schedules the background jobs of `sluice jobs`."""

import logging

import click

from common.logs import configure_logs
from common.metrics import bare_registry, begin_metrics
from gateway.cli.health import serving_health
from gateway.platform.settings import load_settings

EPILOG = """\
\b
Example:
  sluice beat --redis-url redis://redis.internal:6379/0

One scheduler is enough; a second one does no harm. Each setting is also an environment variable
SLUICE_*.
"""


@click.command("beat", epilog=EPILOG)
@click.option(
    "--redis-url", metavar="URL", help="Redis server that gateways share.  [SLUICE_REDIS_URL]"
)
def command(redis_url: str | None) -> None:
    """Schedule background jobs until SIGTERM or Ctrl-C."""
    settings = load_settings(redis_url=redis_url)
    from gateway.jobs.app import SchedulerTick, create_app, run_beat

    configure_logs(settings.log_format, level=logging.WARNING)
    begin_metrics("beat")
    heartbeat = SchedulerTick()
    # The jobs are imported for their schedules; this process runs none of them.
    with serving_health(settings, heartbeat.is_recent, registry=bare_registry()):
        run_beat(create_app(settings), heartbeat)

"""Running the application in this process."""

import gc
import logging

import uvicorn

from gateway.app import create_app
from gateway.settings import Settings

KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time-outs of usual load balancers, so that they close first."""


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; open streams may go on for `drain_timeout`."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    app = create_app(settings)
    # What was made at start-up lives as long as the process, so the collector need not look at it again;
    # and a request makes thousands of objects that are gone when it ends, without the collector.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        server_header=False,
        date_header=True,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(settings.drain_timeout.total_seconds()),
        log_level="warning",
    )

"""Running the application in this process."""

import gc
import logging
import sys

import uvicorn

from contract.metrics import begin_metrics
from gateway.app import create_app
from gateway.http_protocol import allow_connections, http_protocol
from gateway.leaving import LeavingServer
from gateway.settings import Settings

KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time-outs of usual load balancers, so that they close first."""

EXIT_FAILED = 1

_MAPPED_PREFIX_BITS = 96


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, and leave in order. Raises SystemExit if a bug was the reason."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    begin_metrics("gateway")
    allow_connections(settings.max_connections)
    app = create_app(settings)
    # What was made at start-up lives as long as the process, so the collector need not look at it again;
    # and a request makes thousands of objects that are gone when it ends, without the collector.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=http_protocol(settings),
        ws="none",
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=proxy_networks(settings),
        date_header=True,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        log_level="warning",
    )
    LeavingServer(config, app, settings).run()
    if app.state.drain.has_failed:
        sys.exit(EXIT_FAILED)


def proxy_networks(settings: Settings) -> list[str]:
    """Return the networks of proxies that are believed, as they may show: IPv4 as part of IPv6, too."""
    networks = [str(network) for network in settings.trusted_proxies]
    mapped = [
        f"::ffff:{network.network_address}/{network.prefixlen + _MAPPED_PREFIX_BITS}"
        for network in settings.trusted_proxies
        if network.version == 4
    ]
    return networks + mapped

"""Running the application in this process."""

import gc
import logging
import os
import sys
from typing import Final, Literal

import uvicorn
from fastapi import FastAPI

from contract.logs import configure_logs
from contract.metrics import begin_metrics
from gateway.app import create_app, create_operator_app
from gateway.http_protocol import allow_connections, http_protocol
from gateway.leaving import LeavingServer
from gateway.settings import Settings

KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time-outs of usual load balancers, so that they close first."""

OPERATOR_CONNECTIONS: Final = 100
"""Connections of operators and Prometheus: counted apart, so that customers cannot take them all."""
OPERATOR_GRACE_SECONDS: Final = 1

EXIT_FAILED = 1
SWITCH_SECONDS = 0.0001
"""How long a thread that works on a large request keeps the interpreter from the event loop at most, as far as
its code is Python's."""

_MAPPED_PREFIX_BITS = 96


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, and leave in order. Raises SystemExit if a bug was the reason."""
    configure_logs(settings.log_format, level=logging.INFO)
    begin_metrics("gateway")
    allow_connections(settings.max_connections)
    sys.setswitchinterval(SWITCH_SECONDS)
    # Whoever encodes a text does so in its own thread, so that it is known who used how much time.
    # The library reads it from the environment, and nowhere else.
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    app = create_app(settings)
    operators = _operators(settings, app)
    # What was made at start-up lives as long as the process, so the collector need not look at it again;
    # and a request makes thousands of objects that are gone when it ends, without the collector.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    config = _config(settings, app, settings.host, settings.port, settings.max_connections)
    LeavingServer(config, app, settings, operators=operators).run()
    if app.state.drain.has_failed:
        sys.exit(EXIT_FAILED)


def _operators(settings: Settings, app: FastAPI) -> uvicorn.Server | None:
    """Return the server of what only operators reach, on a listener of its own; None if no port is set."""
    if not settings.operator_port:
        return None
    operators = create_operator_app(settings, app)
    address = (settings.operator_host, settings.operator_port)
    config = _config(settings, operators, *address, OPERATOR_CONNECTIONS, lifespan="off")
    # After the customers' requests have ended, nobody waits long for an operator's.
    config.timeout_graceful_shutdown = OPERATOR_GRACE_SECONDS
    return uvicorn.Server(config)


def _config(
    settings: Settings,
    app: FastAPI,
    host: str,
    port: int,
    most_connections: int,
    *,
    lifespan: Literal["auto", "off"] = "auto",
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        lifespan=lifespan,
        http=http_protocol(settings, most_connections=most_connections),
        ws="none",
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=proxy_networks(settings),
        date_header=True,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        log_config=None,
        log_level="warning",
    )


def proxy_networks(settings: Settings) -> list[str]:
    """Return the networks of proxies that are believed, as they may show: IPv4 as part of IPv6, too."""
    networks = [str(network) for network in settings.trusted_proxies]
    mapped = [
        f"::ffff:{network.network_address}/{network.prefixlen + _MAPPED_PREFIX_BITS}"
        for network in settings.trusted_proxies
        if network.version == 4
    ]
    return networks + mapped

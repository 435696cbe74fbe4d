"""Run the gateway application in this process."""

import gc
import logging
import os
import sys
from typing import Final, Literal

import uvicorn
from fastapi import FastAPI

from common.logs import configure_logs
from common.metrics import begin_metrics
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.settings import Settings
from gateway.process.app import create_app, create_operator_app
from gateway.process.server.graceful import GracefulServer
from gateway.process.server.protocol import allow_connections, http_protocol
from gateway.process.supervision.processes import OneOfMany, inherited

KEEP_ALIVE_SECONDS = 75
"""Longer than the usual idle timeouts of load balancers, so that they close connections first."""

OPERATOR_CONNECTIONS: Final = 100
"""Connections for operators and Prometheus, counted separately from customers' connections."""
OPERATOR_GRACE_SECONDS: Final = 1

EXIT_FAILED = 1
SWITCH_SECONDS = 0.0001
"""Maximum time that a thread with a large request keeps the interpreter from the event loop, while
it runs Python code."""

_MAPPED_PREFIX_BITS = 96


def run(settings: Settings, one: OneOfMany | None) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises SystemExit after an internal failure.

    `one` describes this process if it inherits sockets of its parent.
    """
    configure_logs(
        settings.log_format, level=logging.INFO, process=None if one is None else one.number
    )
    begin_metrics("gateway")
    allow_connections(settings.max_connections)
    sys.setswitchinterval(SWITCH_SECONDS)
    # Each caller encodes texts in its own thread, so that the time used can be attributed to it.
    # The library reads this setting only from the environment.
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    app = create_app(settings)
    operators = _operators(settings, app)
    # Objects created at startup live as long as the process, so exclude them from garbage
    # collection. The collector frees a thousand objects in a millisecond, during which nothing else
    # runs, so it must begin after few. SQLAlchemy leaves hundreds for each statement.
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 50)
    config = _config(settings, app, settings.host, settings.port, settings.max_connections)
    server = GracefulServer(config, app, settings, operators=operators, one=one)
    server.run(None if one is None else inherited(one.customers))
    if app.state.drain.has_failed:
        sys.exit(EXIT_FAILED)


def _operators(settings: Settings, app: FastAPI) -> uvicorn.Server | None:
    """Return the operators' server, which has its own listener; None if no port is set."""
    if not settings.operator_port:
        return None
    operators = create_operator_app(settings, app)
    address = (settings.operator_host, settings.operator_port)
    config = _config(settings, operators, *address, OPERATOR_CONNECTIONS, lifespan="off")
    # After customer requests have ended, do not wait long for operator requests.
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
        # It serves most requests without the layers of FastAPI and Starlette around it.
        app.middleware_stack or app,
        host=host,
        port=port,
        loop="uvloop",
        interface="asgi3",
        lifespan=lifespan,
        http=http_protocol(
            settings,
            turns=lambda: app.state.services[LoopTurns],
            most_connections=most_connections,
        ),
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
    """Return the trusted proxy networks, including their IPv4-mapped IPv6 forms."""
    networks = [str(network) for network in settings.trusted_proxies]
    mapped = [
        f"::ffff:{network.network_address}/{network.prefixlen + _MAPPED_PREFIX_BITS}"
        for network in settings.trusted_proxies
        if network.version == 4
    ]
    return networks + mapped

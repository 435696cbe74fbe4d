"""HTTP server for /metrics and health checks, which runs in a separate thread.

Processes without another HTTP server use it: workers, `sluice jobs` and `sluice beat`.
"""

from collections.abc import Callable, Iterable, Mapping
from threading import Thread
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.exposition import ThreadingWSGIServer
from typing_extensions import override

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment


class HealthServer:
    """Serves /metrics and health checks until it is closed.

    Args:
        host: address to listen on.
        port: port to listen on; 0 for any free one.
        checks: check by path, such as `/healthz`; the response is 200 if it returns True, else 503.
        registry: the metrics that /metrics returns.
    """

    def __init__(
        self,
        host: str,
        port: int,
        checks: Mapping[str, Callable[[], bool]],
        *,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._checks = checks
        self._registry = registry
        self._server = make_server(
            host, port, self._answer, server_class=ThreadingWSGIServer, handler_class=_Silent
        )
        self._thread = Thread(target=self._server.serve_forever, name="health", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return self._server.server_port

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(
        self, environment: "WSGIEnvironment", start_response: "StartResponse"
    ) -> Iterable[bytes]:
        path = environment.get("PATH_INFO", "")
        if path == "/metrics":
            # Always the plain format, whatever `Accept` says. In OpenMetrics, prometheus-client
            # would replace the colon in the names of vLLM's metrics with `_`.
            page = generate_latest(self._registry)
            return _answered(start_response, "200 OK", page, CONTENT_TYPE_PLAIN_0_0_4)
        check = self._checks.get(path)
        if check is None:
            return _answered(start_response, "404 Not Found", b"not found\n")
        if not check():
            return _answered(start_response, "503 Service Unavailable", b"no\n")
        return _answered(start_response, "200 OK", b"ok\n")


class _Silent(WSGIRequestHandler):
    @override
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: probes send requests every few seconds."""


def _answered(
    start_response: "StartResponse", status: str, body: bytes, content_type: str = "text/plain"
) -> list[bytes]:
    start_response(status, [("Content-Type", content_type)])
    return [body]

"""Stand-in for telemetry consumers: `python -m bench.observer PORT URL ...`.

Receives OTLP spans over HTTP on a loopback port and drops them, and repeatedly scrapes /metrics of
each base URL. It is a separate process on the measured machine, like a collector and Prometheus. So
its own CPU counts as a cost of telemetry.
"""

import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from typing_extensions import override

SCRAPE_SECONDS: Final = 5.0
"""Three times as often as the chart's monitors scrape."""


class _Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Report readiness."""
        self._answer()

    def do_POST(self) -> None:
        """Receive spans."""
        self.rfile.read(int(self.headers["content-length"]))
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def main() -> None:
    """Observe until the process is terminated; exits with an error if metrics cannot be read."""
    port, urls = int(sys.argv[1]), sys.argv[2:]
    collector = ThreadingHTTPServer(("127.0.0.1", port), _Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    _scrape(urls)


def _scrape(urls: list[str]) -> None:
    accept = {"Accept": "application/openmetrics-text"}
    while True:
        for url in urls:
            request = urllib.request.Request(f"{url}/metrics", headers=accept)  # noqa: S310 - fixed
            with urllib.request.urlopen(request, timeout=10) as page:  # noqa: S310
                page.read()
        time.sleep(SCRAPE_SECONDS)


if __name__ == "__main__":
    main()

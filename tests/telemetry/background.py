"""Background jobs and their scheduler, for tests that read their metrics."""

from tests.support.processes import free_port, wait_until
from tests.support.stack import Stack, http_status


def start_background(stack: Stack, **settings: str) -> dict[str, str]:
    """Start `jobs` and `beat`; return their base URLs for /metrics by name."""
    urls = {}
    for name, start in (("jobs", stack.start_jobs), ("beat", stack.start_beat)):
        port = free_port()
        start(SLUICE_METRICS_PORT=str(port), **settings)
        urls[name] = f"http://127.0.0.1:{port}"
    for name, url in urls.items():
        wait_until(
            lambda url=url: http_status(f"{url}/healthz") == 200,  # type: ignore[misc]
            what=f"{name} answering",
        )
    return urls

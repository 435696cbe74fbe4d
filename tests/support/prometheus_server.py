"""A real Prometheus for tests, which scrapes processes on loopback each second."""

import json
import math
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.processes import free_port, spawn, stop, wait_until

PROMETHEUS: Final = shutil.which("prometheus")


@dataclass(frozen=True, slots=True)
class Target:
    """A scraped process."""

    url: str
    job: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """One server on loopback."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current value of an expression: series with `metric` and `value`."""
        return list(self.get("query", query=expression)["result"])

    def query_range(
        self, expression: str, *, start: float, end: float, step_seconds: float
    ) -> list[dict[str, Any]]:
        """Return an expression's values from `start` to `end`: `metric` and `values`."""
        found = self.get("query_range", query=expression, start=start, end=end, step=step_seconds)
        return list(found["result"])

    def numbers(self, expression: str, *, since: float) -> list[float]:
        """Return every number of any series of an expression at each second since then."""
        series = self.query_range(expression, start=since, end=time.time(), step_seconds=1)
        values = (float(value) for each in series for _, value in each["values"])
        return [value for value in values if not math.isnan(value)]

    def get(self, path: str, **parameters: object) -> Any:
        """Return the data of an API response; raise `urllib.error.HTTPError` for an error."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as response:
            return json.load(response)["data"]


@contextmanager
def running_prometheus(
    executable: str, targets: Iterable[Target], rules: Iterable[Path] = ()
) -> Iterator[PrometheusServer]:
    """Run a server for the length of a block; yield when it has scraped each target once.

    It also evaluates rules each second.
    """
    targets = list(targets)
    with tempfile.TemporaryDirectory(prefix="sluice-prometheus-") as folder:
        config = Path(folder, "prometheus.yml")
        config.write_text(yaml.safe_dump(_configuration(targets, rules)))
        port = free_port()
        process = spawn(
            executable,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        server = PrometheusServer(f"http://127.0.0.1:{port}")
        try:
            wait_until(lambda: _is_ready(server.url), what="Prometheus being ready")
            # It discovers targets some seconds later.
            wait_until(
                lambda: len(server.query("up == 1")) == len(targets),
                what="Prometheus scraping every target",
            )
            yield server
        finally:
            stop(process)


def _configuration(targets: Iterable[Target], rules: Iterable[Path]) -> dict[str, Any]:
    by_job: dict[str, list[dict[str, Any]]] = {}
    for target in targets:
        address = target.url.removeprefix("http://")
        by_job.setdefault(target.job, []).append(
            {"targets": [address], "labels": dict(target.labels)}
        )
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {"job_name": job, "static_configs": configs} for job, configs in by_job.items()
        ],
    }


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
            return True
    except OSError:
        return False

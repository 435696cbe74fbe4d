"""Check that no worker loses its jobs under full load: `python -m bench.false_alarms`.

Two workers run as fast as they can, beside processes that take all cores. The program exits with 1
if a gateway finds a worker gone or resumes a job. It prints how many heartbeats came after which
gap, and the errors of requests: beside a busy machine, Redis may be too slow for some.
"""

import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click
import httpx
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from bench.client import Lane, Load, Request
from bench.measure import TIMEOUT_SECONDS
from bench.sluice import Sluice, running_sluice
from bench.starting import MODEL, start
from bench.systems import Deployment, Engine
from bench.tables import table

ALARMS: Final = ("sluice_gateway_gone_workers_total", "sluice_gateway_resumed_jobs_total")
"""Counters of the gateway that must stay 0."""
GAPS: Final = "sluice_worker_heartbeat_gap_seconds_bucket"
_TENANT: Final = "load"
_STREAMS: Final = 128
_TOKENS: Final = 200
_PROMPT: Final = "The harbour " * 100
_LONGEST_ROUND_SECONDS: Final = 60.0


def _requests(until: float) -> Iterator[Request]:
    for number in itertools.count():
        if time.monotonic() > until:
            return
        yield Request(
            model=MODEL,
            prompt=f"{number} {_PROMPT}",
            completion_tokens=_TOKENS,
            streamed=True,
        )


async def _load(url: str, key: str, seconds: float) -> tuple[int, list[str]]:
    """Keep all streams busy. Return the number of responses, and the errors."""
    until = time.monotonic() + seconds
    load = Load([Lane(url, key, _requests(until)) for _ in range(_STREAMS)])
    try:
        await load.open()
        load.start()
        await load.wait(seconds + TIMEOUT_SECONDS)
    finally:
        load.close()
    return len(load.answers), [answer.error for answer in load.answers if answer.error]


def _metrics(url: str) -> dict[tuple[str, str], float]:
    """Return the values of a process's metrics by name and, for histograms, upper bound."""
    values: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            place = sample.name, sample.labels.get("le", "")
            values[place] = values.get(place, 0.0) + sample.value
    return values


def _gaps(url: str) -> dict[str, int]:
    """Return the number of a worker's heartbeats up to each gap."""
    return {bound: round(count) for (name, bound), count in _metrics(url).items() if name == GAPS}


def _run(sluice: Sluice, worker_urls: list[str], minutes: float) -> bool:
    """Run the load, print its figures, and return whether there was no alarm."""
    *_, gateway = sluice.metrics_urls()
    [url], key = sluice.urls(1), sluice.key(_TENANT)
    until, responses, errors = time.monotonic() + 60 * minutes, 0, list[str]()
    while (left := until - time.monotonic()) > 0:
        number, failed = uvloop.run(_load(url, key, min(left, _LONGEST_ROUND_SECONDS)))
        responses += number
        errors += failed
        click.echo(f"{responses} responses, {len(errors)} wrong, {max(left, 0):.0f} s left")
    metrics = _metrics(gateway)
    alarms = {name: metrics.get((name, ""), 0.0) for name in ALARMS}
    counts = [_gaps(each) for each in worker_urls]
    head = ("gap of heartbeats up to, s", *(f"worker {place + 1}" for place in range(len(counts))))
    rows = [[bound, *(str(each[bound]) for each in counts)] for bound in counts[0]]
    click.echo("\n".join(table(head, rows)))
    click.echo(", ".join(f"{name} {count:g}" for name, count in alarms.items()))
    for error, number in Counter(errors).items():
        click.echo(f"{number} times: {error}")
    return not any(alarms.values())


@click.command("false_alarms")
@click.option("--minutes", type=click.FloatRange(0.1, 120), default=10.0, show_default=True)
@click.option(
    "--engine",
    type=click.Choice([each.value for each in Engine]),
    default=Engine.SCRIPTED.value,
    show_default=True,
)
@click.option(
    "--busy",
    type=click.IntRange(0, 64),
    default=2,
    show_default=True,
    help="Processes that do nothing but use a core.",
)
def main(*, minutes: float, engine: str, busy: int) -> None:
    """Keep two workers fully loaded and count false alarms."""
    deployment = Deployment(engine=Engine(engine), max_sequences=64, context_window=1024)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-")))
        sluice = stack.enter_context(running_sluice(deployment, folder, workers=2))
        *workers, _ = sluice.metrics_urls()
        for place in range(busy):
            spin = [sys.executable, "-c", "while True: pass"]
            stack.callback(start(f"busy {place}", spin, folder=folder, environment={}).stop)
        is_quiet = _run(sluice, workers, minutes)
    if not is_quiet:
        sys.exit(1)


if __name__ == "__main__":
    main()

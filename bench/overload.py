"""Memory, queue and rejections at ten times a deployment's capacity: `python -m bench.overload`.

Every client sends a request. After a rejection it waits exactly for the time in the response;
after a success it sends again at once. The values printed each second must stay level: waiting jobs
at their limit, memory where it was after the first seconds.
"""

import asyncio
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from urllib.parse import urlsplit

import click
from redis.asyncio import Redis

from bench.processes import resident_mib
from bench.sluice import Sluice, running_sluice
from bench.starting import MODEL
from bench.systems import Deployment, Engine
from contract import keys

_TENANT = "overload"
_RESPONSE_SECONDS = 600.0
_REJECTIONS = (429, 503)


@dataclass(slots=True)
class Tally:
    """Results of all clients so far."""

    served: int = 0
    rejected: int = 0
    others: Counter[int] = field(default_factory=Counter)
    """Other responses, by status."""
    rejected_ms: list[float] = field(default_factory=list)
    """How long a rejection took."""
    retry_after_seconds: list[float] = field(default_factory=list)
    served_after: Counter[int] = field(default_factory=Counter)
    """Served requests, by how often they had been rejected before."""


class Client:
    """One client with one connection."""

    def __init__(self, url: str, key: str, body: bytes, tally: Tally) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname, address.port
        self._tally = tally
        self._request = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
            f"authorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def run(self) -> None:
        """Send requests until cancelled."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        rejections = 0
        try:
            while True:
                began = time.perf_counter()
                writer.write(self._request)
                status, wait_seconds = await self._response(reader)
                if status in _REJECTIONS:
                    rejections += 1
                    self._tally.rejected += 1
                    self._tally.rejected_ms.append(1000 * (time.perf_counter() - began))
                    self._tally.retry_after_seconds.append(wait_seconds)
                    await asyncio.sleep(wait_seconds)
                elif status == 200:
                    self._tally.served += 1
                    self._tally.served_after[rejections] += 1
                    rejections = 0
                else:
                    self._tally.others[status] += 1
        finally:
            writer.close()

    @staticmethod
    async def _response(reader: asyncio.StreamReader) -> tuple[int, float]:
        async with asyncio.timeout(_RESPONSE_SECONDS):
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:])
            await reader.readexactly(int(headers["content-length"]))
        return int(lines[0].split()[1]), int(headers.get("retry-after-ms", 0)) / 1000


async def press(
    sluice: Sluice, *, clients: int, seconds: float, tokens: int, prompt_words: int
) -> Tally:
    """Run this many clients, and print the state of the deployment once a second."""
    tally, key = Tally(), await asyncio.to_thread(sluice.key, _TENANT)
    urls = await asyncio.to_thread(sluice.urls, 1)
    prompt = "word " * prompt_words
    body = json.dumps(
        {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    ).encode()
    tasks = [asyncio.create_task(Client(urls[0], key, body, tally).run()) for _ in range(clients)]
    redis = Redis.from_url(f"redis://127.0.0.1:{sluice.redis_port}/0")
    groups = sluice.groups(1)
    click.echo(
        "| second | gateway MiB | Redis MiB | waiting | served | rejected |\n"
        "|---|---|---|---|---|---|"
    )
    began = time.monotonic()
    try:
        while (passed := time.monotonic() - began) < seconds:
            await asyncio.sleep(1)
            memory = {name: sum(map(resident_mib, pids)) for name, pids in groups.items()}
            waiting = int(await redis.get(keys.waiting(MODEL)) or 0)
            click.echo(
                f"| {passed:.0f} | {memory['gateway']:.0f} | {memory['redis']:.1f} | {waiting} "
                f"| {tally.served} | {tally.rejected} |"
            )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await redis.aclose()
    return tally


@click.command("overload")
@click.option("--seconds", default=60.0, show_default=True, help="Duration of the load.")
@click.option("--most-waiting", default=64, show_default=True, help="Maximum length of the queue.")
@click.option("--sequences", default=16, show_default=True, help="Sequences in the engine's batch.")
@click.option(
    "--times",
    default=10,
    show_default=True,
    help="Number of clients, as a multiple of both together.",
)
@click.option("--tokens", default=50, show_default=True, help="Completion tokens of a request.")
@click.option("--prompt-words", default=200, show_default=True, help="Words of its prompt.")
def main(
    *,
    seconds: float,
    most_waiting: int,
    sequences: int,
    times: int,
    tokens: int,
    prompt_words: int,
) -> None:
    """Overload a deployment with the scripted engine."""
    deployment = Deployment(
        engine=Engine.SCRIPTED, max_sequences=sequences, context_window=1024, step_seconds=0.02
    )
    settings = {"SLUICE_MAX_WAITING_JOBS": str(most_waiting)}
    clients = times * (most_waiting + sequences)
    with (
        tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder,
        running_sluice(deployment, Path(folder), settings=settings) as sluice,
    ):
        load = press(
            sluice, clients=clients, seconds=seconds, tokens=tokens, prompt_words=prompt_words
        )
        tally = asyncio.run(load)
    click.echo(f"\n{clients} clients; {tally.served} served, {tally.rejected} rejected")
    if tally.others:
        click.echo(f"other responses: {dict(tally.others)}")
    click.echo(
        f"served after this number of rejections: {dict(sorted(tally.served_after.items()))}"
    )
    for name, values in (
        ("rejected after ms", tally.rejected_ms),
        ("retry after s", tally.retry_after_seconds),
    ):
        if len(values) > 1:
            cuts = quantiles(values, n=100)
            click.echo(f"{name}: p50 {cuts[49]:.1f}, p99 {cuts[98]:.1f}, maximum {max(values):.1f}")


if __name__ == "__main__":
    main()

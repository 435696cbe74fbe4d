"""CPU flame graph of a gateway under load: `python -m bench.flame PICTURE.svg`.

py-spy samples the gateway while a load of `make bench` runs with the scripted engine. It samples
threads that hold the interpreter lock: writes to sockets are included, reads by the event loop are
not. The picture is one file: a browser shows it, and a click enlarges a part. `--repository` draws
an earlier checkout.
"""

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from bench.measure import drive
from bench.scenarios import Scenario
from bench.sluice import Sluice, running_sluice
from bench.starting import REPOSITORY
from bench.systems import Deployment, Engine

_RATE: Final = 200
"""Samples a second. Each one stops the gateway for about a millisecond."""
_TITLE: Final = re.compile(r'(<text id="title"[^>]*>)[^<]*')
_LOADS: Final = {
    "tokens": Scenario(
        name="flame",
        variant="256 streams of 250 tokens, one token every 20 ms",
        streams=256,
        requests=1,
        completion_tokens=250,
        engine=Engine.SCRIPTED,
        step_seconds=0.02,
    ),
    "requests": Scenario(
        name="flame",
        variant="32 connections, 16 tokens, not streamed",
        streams=32,
        requests=1,
        completion_tokens=16,
        streamed=False,
        prompt_words=8,
        engine=Engine.SCRIPTED,
    ),
}


@click.command(help=__doc__)
@click.argument("picture", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--load", type=click.Choice(sorted(_LOADS)), default="tokens", show_default=True)
@click.option(
    "--seconds", type=click.IntRange(1, 120), default=15, show_default=True, help="Sampled time."
)
@click.option(
    "--repository",
    type=click.Path(exists=True, file_okay=False, path_type=Path, resolve_path=True),
    default=REPOSITORY,
    help="Checkout whose gateway is drawn.  [default: this one]",
)
def main(picture: Path, *, load: str, seconds: int, repository: Path) -> None:
    """Draw the picture."""
    # The load runs for a second before and after the samples.
    scenario = replace(_LOADS[load], seconds=seconds + 2.0)
    deployment = Deployment(
        engine=Engine.SCRIPTED,
        max_sequences=scenario.streams,
        context_window=1024,
        step_seconds=scenario.step_seconds,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        running_sluice(deployment, Path(folder), repository=repository) as sluice,
        ThreadPoolExecutor(1) as threads,
    ):
        drive(replace(scenario, seconds=1.0), sluice, seed="warm")
        running = threads.submit(drive, scenario, sluice, seed="flame")
        _record(sluice, picture, seconds=seconds)
        running.result()
    drawn = picture.read_text()
    # py-spy's title is its command line.
    picture.write_text(_TITLE.sub(rf"\1Gateway: {scenario.variant}", drawn, count=1))


def _record(sluice: Sluice, picture: Path, *, seconds: int) -> None:
    (gateway,) = sluice.groups(1)["gateway"]
    command = ["record", "--pid", str(gateway), "--duration", str(seconds), "--rate", str(_RATE)]
    program = Path(sys.executable).with_name("py-spy")
    subprocess.run([program, *command, "--gil", "--output", picture], check=True)


if __name__ == "__main__":
    main()

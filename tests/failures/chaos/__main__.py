"""Inject faults into a deployment under load, and check its invariants: `make chaos`.

Exit codes: 0 if every invariant held, 1 if one did not.
"""

import argparse
import sys
from datetime import datetime
from pathlib import Path

import uvloop

from tests.failures.chaos.deployment import Size
from tests.failures.chaos.faults import Kind
from tests.failures.chaos.history import Behaviour
from tests.failures.chaos.load import BEHAVIOURS
from tests.failures.chaos.run import FAULT_EVERY_SECONDS, Options, run


def main() -> int:
    """Run with the options of the command line, and print the report."""
    arguments = _parser().parse_args()
    options = Options(
        seed=arguments.seed,
        seconds=arguments.minutes * 60,
        database=arguments.database,
        is_cluster=arguments.cluster,
        size=Size(gateways=arguments.gateways, workers=arguments.workers),
        lines=arguments.lines,
        clients=arguments.clients,
        every=arguments.every,
        kinds=arguments.kinds or tuple(Kind),
        recipes=tuple(arguments.recipes),
        behaviours={each: BEHAVIOURS[each] for each in arguments.behaviours or BEHAVIOURS},
    )
    report = uvloop.run(run(options, say=_say))
    lines = [report.text(), "", report.slowest(), "", report.figures.table()]
    lines += [f"Skipped: {kind}: {why}" for kind, why in report.figures.skipped.items()]
    _write("\n".join(lines))
    if arguments.json:
        report.figures.write(arguments.json)
    return 1 if report.violations else 0


def _say(text: str) -> None:
    _write(f"{datetime.now().astimezone():%H:%M:%S} {text}")


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make chaos ARGS=...", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2, help="how long faults are injected")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same faults")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument(
        "--cluster", action="store_true", help="three masters of Redis with a replica each"
    )
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--lines", type=int, default=0, help="of batches beside the requests")
    parser.add_argument("--clients", type=int, default=16, help="concurrent requests")
    parser.add_argument("--every", type=float, default=FAULT_EVERY_SECONDS, help="seconds")
    parser.add_argument("--recipes", nargs="+", default=(), help="names of requests, without: all")
    parser.add_argument("--kinds", type=Kind, choices=Kind, nargs="+", help="kinds of faults")
    parser.add_argument(
        "--behaviours",
        type=Behaviour,
        choices=BEHAVIOURS,
        nargs="+",
        help=f"behaviours of clients: {', '.join(BEHAVIOURS)}",
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Break a deployment while it is used, and see that nothing is lost: `python -m tests.chaos`.

Exit codes: 0 when every invariant held, 1 when one did not.
"""

import argparse
import sys
from datetime import datetime
from pathlib import Path

import uvloop

from tests.chaos.deployment import Size
from tests.chaos.load import MANNERS
from tests.chaos.run import FAULT_EVERY_SECONDS, Options, run
from tests.chaos.story import Manner


def main() -> int:
    """Run as the command line says, and tell what came of it."""
    arguments = _parser().parse_args()
    options = Options(
        seed=arguments.seed,
        seconds=arguments.minutes * 60,
        database=arguments.database,
        size=Size(gateways=arguments.gateways, workers=arguments.workers),
        clients=arguments.clients,
        every=arguments.every,
        manners={each: MANNERS[each] for each in arguments.manners or MANNERS},
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
    parser.add_argument("--minutes", type=float, default=2, help="how long faults go on")
    parser.add_argument("--seed", type=int, default=1, help="the same faults for the same seed")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--clients", type=int, default=16, help="requests at a time")
    parser.add_argument("--every", type=float, default=FAULT_EVERY_SECONDS, help="seconds")
    parser.add_argument(
        "--manners", type=Manner, nargs="+", help=f"what clients do: {', '.join(Manner)}"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Coverage of lines and branches over every process of a run, by SlipCover.

    COVERAGE_FOLDER=FOLDER pytest -p tests.support.measuring --numprocesses 3
    python -m tests.support.measuring FOLDER --floor PERCENT

The processes of pytest-xdist measure themselves, and so do the gateways, workers and job runners that they start
as forks. Other programs do not: the probes of a gateway take four seconds to add.

On Python 3.11, coverage.py observes all code that runs, libraries too, which doubles the time of a run.
SlipCover adds probes to our modules when they are imported, and costs a few per cent.
"""

import argparse
import atexit
import fcntl
import json
import os
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, NoReturn

from slipcover import FileMatcher, ImportManager, Slipcover, print_coverage

FOLDER_VARIABLE: Final = "COVERAGE_FOLDER"
"""Names the folder for what each process executes. Nothing is measured without it."""
REPOSITORY: Final = Path(__file__).parents[2]
_SOURCES: Final = [str(REPOSITORY / package) for package in ("contract", "gateway", "worker")]
_LEFT_OUT: Final = [
    str(REPOSITORY / left_out)
    for left_out in ("worker/demo_model/*", "gateway/accounts/migrations/*")
]
"""No process imports the former; Alembic loads the latter anew in each process."""
_NEVER: Final = 2**31 - 1
"""Executions after which a probe is removed: only functions that SlipCover finds in modules could lose theirs."""

_RUNNING: Final = "running.lock"
_PATIENCE_SECONDS: Final = 60.0


def pytest_load_initial_conftests() -> None:
    """Begin before anything of ours is imported."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        begin()


def begin() -> None:
    """Measure what this process imports from now on, and its forks; write that when they end.

    In a fork of a process that is measured, this changes nothing.
    """
    if FOLDER_VARIABLE not in os.environ or Slipcover.lines_from_code is _nothing:
        return
    # Held until this process and its forks have ended; not inherited by programs.
    running = (Path(os.environ[FOLDER_VARIABLE]) / _RUNNING).open("ab")
    fcntl.flock(running, fcntl.LOCK_SH)
    # Only the report needs to know what could have been executed.
    Slipcover.lines_from_code = Slipcover.branches_from_code = staticmethod(_nothing)
    measured = Slipcover(branch=True, d_miss_threshold=_NEVER)
    matcher = FileMatcher(sources=_SOURCES, omit=_LEFT_OUT)
    ImportManager(measured, matcher).__enter__()

    def write(_: IO[bytes] = running) -> None:
        # Numbers of lines, and pairs of them for branches.
        seen = {file: list(its) for file, its in measured.newly_seen.items()}
        if seen:
            path = Path(os.environ[FOLDER_VARIABLE]) / f"{uuid.uuid4()}.json"
            path.write_text(json.dumps(seen))

    end = os._exit

    def write_and_end(status: int) -> NoReturn:
        write()
        end(status)

    atexit.register(write)
    os._exit = write_and_end  # Children of multiprocessing, and workers, end this way.
    os.register_at_fork(after_in_child=measured.signal_child_process)


def _nothing(_: object) -> tuple[()]:
    """Return that no code could be executed."""
    return ()


def main() -> None:
    """Print the coverage of a run; exit with 1 if it is below the floor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--floor", type=float, default=0.0, help="least per cent")
    arguments = parser.parse_args()
    _wait_for_the_last(arguments.folder)
    everything = Slipcover(branch=True, source=_SOURCES, omit=_LEFT_OUT)
    for path in arguments.folder.glob("*.json"):
        for file, its in json.loads(path.read_text()).items():
            everything.all_seen[file].update(
                tuple(each) if isinstance(each, list) else each for each in its
            )
    coverage = everything.get_coverage()
    print_coverage(coverage, outfile=sys.stdout, skip_covered=True, missing_width=80)
    reached = coverage["summary"]["percent_covered"]
    if reached < arguments.floor:
        sys.exit(f"coverage: {reached:.2f} % is less than the floor of {arguments.floor} %")


def _wait_for_the_last(folder: Path) -> None:
    """Wait until the processes that are measured have ended, which servers do a little after the tests."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with (folder / _RUNNING).open("ab") as running:
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(running, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.1)
    sys.stderr.write(
        "coverage: Processes of the tests still run; what they executed is not counted.\n"
    )


if __name__ == "__main__":
    main()

"""Coverage of lines and branches over every process of a run, by SlipCover.

    COVERAGE_FOLDER=FOLDER pytest -p tests.support.measuring --numprocesses 3
    python -m tests.support.measuring FOLDER --floor PERCENT

The processes of pytest-xdist measure themselves, and so do the gateways, workers and job runners
that they start as forks. Other programs do not: adding the probes of a gateway takes four seconds.

On Python 3.11, coverage.py observes all code that runs, libraries too, which doubles the time of a
run. SlipCover adds probes to our modules when they are imported, and removes those that have been
executed.
"""

import argparse
import atexit
import ctypes
import dis
import fcntl
import json
import os
import sys
import time
import uuid
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Final, NoReturn

from slipcover import FileMatcher, ImportManager, Slipcover, print_coverage

FOLDER_VARIABLE: Final = "COVERAGE_FOLDER"
"""The variable with the folder for the results of each process. Nothing is measured without it."""
REPOSITORY: Final = Path(__file__).parents[2]
_SOURCES: Final = [
    str(REPOSITORY / package) for package in ("common", "contract", "gateway", "worker")
]
_LEFT_OUT: Final = [str(REPOSITORY / "gateway/platform/database/migrations/*")]
"""Alembic loads these scripts again in each process."""
_REMOVAL: Final = 20
"""Executions of one probe after which all executed probes are removed."""
_NOP, _JUMP_FORWARD = dis.opmap["NOP"], dis.opmap["JUMP_FORWARD"]

_RUNNING: Final = "running.lock"
_PATIENCE_SECONDS: Final = 60.0


class _Measured(Slipcover):  # type: ignore[misc] # SlipCover has no types
    """Removes probes from code in place.

    SlipCover makes new code for the functions that it finds in modules, which are not all. CPython
    3.11 executes a part of the code object itself, which begins after its fixed fields (`co_code`
    is a copy). A probe begins with a NOP whose argument is the probe's length, so only this
    instruction has to become a jump.
    """

    def __init__(self) -> None:
        super().__init__(branch=True, d_miss_threshold=_REMOVAL)
        self._probes: dict[str, dict[object, list[int]]] = {}
        self._indexed = 0

    def deinstrument_seen(self) -> None:
        """Remove every executed probe."""
        with self.lock:
            self._index()
            for file, seen in self._get_newly_seen().items():
                self.all_seen[file] |= seen
                for each in seen:
                    for address in self._probes.get(file, {}).pop(each, ()):
                        ctypes.memset(address, _JUMP_FORWARD, 1)

    def _index(self) -> None:
        # Empty from Python 3.12, which reports each line once by itself (sys.monitoring).
        code2index = vars(self).get("code2index", {})
        for code, probes in islice(code2index.items(), self._indexed, None):
            addresses = self._probes.setdefault(code.co_filename, {})
            start = id(code) + type(code).__basicsize__
            for offset, what in probes:
                assert ctypes.string_at(start + offset, 1)[0] == _NOP
                addresses.setdefault(what, []).append(start + offset)
        self._indexed = len(code2index)


def pytest_load_initial_conftests() -> None:
    """Begin before any measured module is imported."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        begin()


def begin() -> None:
    """Measure what this process and its forks import from now on; write the result at their end.

    In a fork of a measured process, this changes nothing.
    """
    if FOLDER_VARIABLE not in os.environ or Slipcover.lines_from_code is _nothing:
        return
    # Held until this process and its forks have ended; not inherited by programs.
    running = (Path(os.environ[FOLDER_VARIABLE]) / _RUNNING).open("ab")
    fcntl.flock(running, fcntl.LOCK_SH)
    # Only the report needs the lines that were never executed.
    Slipcover.lines_from_code = Slipcover.branches_from_code = staticmethod(_nothing)
    measured = _Measured()
    matcher = FileMatcher(sources=_SOURCES, omit=_LEFT_OUT)
    ImportManager(measured, matcher).__enter__()

    def write(_: IO[bytes] = running) -> None:
        measured.deinstrument_seen()
        # Numbers of lines, and pairs of them for branches.
        seen = {file: list(its) for file, its in measured.all_seen.items()}
        if seen:
            path = Path(os.environ[FOLDER_VARIABLE]) / f"{uuid.uuid4()}.json"
            draft = path.with_suffix(".draft")
            draft.write_text(json.dumps(seen))
            draft.rename(path)  # SIGKILL may end this process meanwhile.

    end = os._exit

    def write_and_end(status: int) -> NoReturn:
        write()
        end(status)

    atexit.register(write)
    os._exit = write_and_end  # Children of multiprocessing, and workers, end this way.
    os.register_at_fork(
        before=measured.deinstrument_seen, after_in_child=measured.signal_child_process
    )


def _nothing(_: object) -> tuple[()]:
    """Return an empty list of executable lines."""
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
    """Wait until the measured processes have ended; servers do a little after the tests."""
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

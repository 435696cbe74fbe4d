"""A worker that writes when its steps ended: `python -m bench.timed_worker FILE [OPTION]...`.

The file has eight bytes for each step: seconds of `time.perf_counter`, which is the same clock in
all processes of a Linux machine.
"""

import sys
import time
from array import array
from pathlib import Path

from worker import telemetry
from worker.__main__ import command
from worker.engine.base import EngineStep


def main() -> None:
    """Run a worker with the options after the file."""
    path, *options = sys.argv[1:]
    count = telemetry.note_step
    with Path(path).open("wb", buffering=0) as file:

        def note_step(step: EngineStep) -> None:
            file.write(array("d", [time.perf_counter()]))
            count(step)

        telemetry.note_step = note_step
        command(options, prog_name="python -m worker")


if __name__ == "__main__":
    main()

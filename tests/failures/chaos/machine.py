"""Detects stalls of the machine itself: nothing runs on it, or its disk writes nothing.

A hypervisor pauses a virtual machine now and then, and the host's disk stalls. No schedule contains
this, and no deployment responds meanwhile.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

BEAT_SECONDS: Final = 0.2
STANDSTILL_SECONDS: Final = 1.0
"""Two beats that are farther apart than this show a stall."""


class Standstill(NamedTuple):
    """A stall of the machine, in seconds of the monotonic clock."""

    began: float
    ended: float


@contextmanager
def watched_machine(folder: Path) -> Iterator[list[Standstill]]:
    """Write to the disk of a folder continuously for the length of a block; record the stalls."""
    found: list[Standstill] = []
    is_over = threading.Event()
    arguments = (folder / "heartbeat", found, is_over, time.monotonic())
    watcher = threading.Thread(target=_watch, args=arguments)
    watcher.start()
    try:
        yield found
    finally:
        is_over.set()
        watcher.join()


def _watch(path: Path, found: list[Standstill], is_over: threading.Event, began: float) -> None:
    last, is_last = began, False
    with path.open("wb") as file:
        while not is_last:
            is_last = is_over.wait(BEAT_SECONDS)
            file.seek(0)
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            now = time.monotonic()
            if now - last > BEAT_SECONDS + STANDSTILL_SECONDS:
                found.append(Standstill(last, now))
            last = now

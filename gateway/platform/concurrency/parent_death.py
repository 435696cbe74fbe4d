"""Run a program that ends when its parent process ends, whatever the reason.

    python -P -m gateway.platform.concurrency.parent_death PARENT_PID PROGRAM ARGUMENT...

Linux can send a signal to a process when its parent dies. The process must request this itself, and
the request survives exec. To Linux the parent is the thread that started the process, so that
thread must keep running; use, for example, the main thread.
"""

import ctypes
import os
import signal
import sys
from typing import Never

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Tether this process to PARENT_PID and become PROGRAM."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    end_with(parent)
    try:
        become(program)
    except OSError as error:
        sys.exit(f"{program[0]} cannot be started: {error.strerror}.")


def become(program: list[str]) -> Never:
    """Replace this process by a program of the caller's, without a shell. Raises OSError."""
    os.execvp(program[0], program)  # noqa: S606 - this function is for programs of its callers


def tethered(*program: str) -> tuple[str, ...]:
    """Return the command that runs a program which ends with this process.

    With `-P`, Python ignores a folder called `gateway` in the current folder.
    """
    return (
        sys.executable,
        "-P",
        "-m",
        "gateway.platform.concurrency.parent_death",
        str(os.getpid()),
        *program,
    )


def end_with(parent: int) -> None:
    """End this process when its parent ends, or at once if the parent has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("The parent process has already ended.")


def adopt_orphans() -> None:
    """Become the parent of processes that our children leave running, to stop and reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()

"""Starts a program that ends when the process that started it does, however that came about.

    python -m gateway.commands.tether PARENT_PID PROGRAM ARGUMENT...

Linux can send a signal to a process when its parent dies; the process has to ask for it itself, and
keeps it when it becomes another program. To Linux the parent is the thread that started the process, so
that must be one that stays, such as the main thread.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Tether this process to PARENT_PID and become PROGRAM."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    end_with(parent)
    try:
        os.execvp(program[0], program)  # noqa: S606 - the caller's program, without a shell
    except OSError as error:
        sys.exit(f"{program[0]} cannot be started: {error.strerror}.")


def end_with(parent: int) -> None:
    """End this process when the one that started it ends; at once, if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("The process that started this one is gone already.")


def adopt_orphans() -> None:
    """Become the parent of whatever our children leave behind, so that it can be ended and reaped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()

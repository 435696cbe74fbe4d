"""Child processes of tests: free ports, waiting, and an end that leaves nothing behind."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable


def tethered(*command: str) -> list[str]:
    """Return a command that ends with this process, even if this process is killed."""
    return [sys.executable, "-m", "gateway.commands.tether", str(os.getpid()), *command]


def free_port() -> int:
    """Return a TCP port on loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Poll `condition` until it holds. Raise TimeoutError, saying `what` did not happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {seconds} s")
        time.sleep(0.02)


def stop(process: subprocess.Popen[bytes], *, seconds: float = 15.0) -> int:
    """End a process: SIGTERM, then SIGKILL when it does not go. Return its exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait(5)

"""Servers as child processes: start, wait until ready, stop without leftovers."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
CHECKPOINT = REPOSITORY / "worker" / "demo_model" / "checkpoint"
MODEL = "sluice-tiny"

_TETHER = (sys.executable, "-m", "gateway.platform.concurrency.parent_death")
_LOG_TAIL_LINES = 15
_ORPHAN_SECONDS = 10.0


class StartError(Exception):
    """A server did not start."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running program, leader of its own process group."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def pid(self) -> int:
        """Id of the program's first process and of the group."""
        return self.process.pid

    def wait_until_ready(self, url: str, *, seconds: float) -> None:
        """Wait until a GET of `url` returns 200; on timeout raise StartError with the log end."""
        deadline = time.monotonic() + seconds
        while http_status(url) != 200:
            self.check()
            if time.monotonic() > deadline:
                raise StartError(
                    f"{self.name} was not ready after {seconds:.0f} s:\n{self._log_tail()}"
                )
            time.sleep(0.1)

    def check(self) -> None:
        """Raise StartError with the end of the log if the program has exited."""
        if self.process.poll() is not None:
            raise StartError(f"{self.name} ended:\n{self._log_tail()}")

    def stop(self, *, seconds: float = 30.0) -> None:
        """Stop the program with SIGTERM, then the rest of its group with SIGKILL."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        _end_group(self.pid)
        self.process.wait(_ORPHAN_SECONDS)

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines)


def start(
    name: str,
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    repository: Path = REPOSITORY,
) -> Server:
    """Start a program that ends with this one, with the modules of `repository`.

    Its output is written to `folder`/`name`.log.
    """
    log = folder / f"{name.replace(' ', '-')}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*_TETHER, str(os.getpid()), *command],
            cwd=repository,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Use a separate group, so that Ctrl-C reaches only this process, which stops the
            # servers in order. Do not use setsid: Linux first divides CPU time between sessions
            # (sched_autogroup), and a client in another session than a busy engine waits up to 170
            # ms before it may read.
            process_group=0,
        )
    return Server(name, process, log)


def run_program(module: str, argument: str) -> list[dict[str, Any]]:
    """Run a module of this repository and return the objects that it prints, a line of JSON each.

    Raises StartError with the end of its output if it fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, argument],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-_LOG_TAIL_LINES:])
        raise StartError(f"{module} ended with {done.returncode}:\n{tail}")
    lines = filter(lambda line: line.startswith("{"), done.stdout.splitlines())
    return list(map(json.loads, lines))


def free_port() -> int:
    """Return a free TCP port on loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def http_status(url: str) -> int:
    """Return the status of a GET, or 0 without a response."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310 - our own servers
            status: int = response.status
            return status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _end_group(group: int) -> None:
    """Kill what a server left running, such as the processes of its engine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)

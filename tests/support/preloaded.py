"""Processes of Sluice that start in a tenth of a second: forks of one that has imported their code.

    python -m tests.support.preloaded ROLE CONTROL_FD

Importing a gateway takes three seconds of a processor, and a run of the tests starts hundreds of gateways,
workers and job runners. Each fork is a process of its own, with the environment, the arguments, the signals
and the exit of a program that was started by its command.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from select import POLLIN, poll, select
from threading import Lock
from typing import Any, Final

from typing_extensions import override

from gateway.commands.tether import end_with
from tests.support import measuring

PROGRAMS: Final = ("gateway.cli", "worker", "tests.support.hasty", "tests.chaos.program")
"""Modules that are run as forks; any other command is started as usual."""
_IMPORTED: Final = {
    "beat": ("gateway.commands.beat", "gateway.jobs.app"),
    "gateway": ("gateway.commands.gateway", "gateway.serve"),
    "jobs": ("gateway.commands.jobs", "gateway.jobs.app", "gateway.jobs.runner"),
    "worker": ("worker.main",),
}
"""By role. A process has the metrics of what it has imported, so each role has a server of its own."""
_OF_INTERPRETER: Final = ("LD_", "PYTHON", "COVERAGE_")
"""Beginnings of variables that an interpreter or the linker reads when it starts."""
_STATUS: Final = struct.Struct("i")


class Fork(subprocess.Popen[bytes]):
    """A fork as its starter sees it. Its output goes to files: it has no pipes."""

    def __init__(self, command: list[str], pid: int, status: socket.socket) -> None:
        self.args = command
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        self._status = status.detach()
        self._reading = Lock()
        self._child_created = False  # Popen would wait for it, but it is no child of ours.

    @override
    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    @override
    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready = poll()
            ready.register(self._status, POLLIN)
            if not ready.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._receive()
        assert self.returncode is not None
        return self.returncode

    def _receive(self) -> None:
        with self._reading:
            # Another thread may have waited, too.
            if self.returncode is None:
                status = os.read(self._status, _STATUS.size)
                os.close(self._status)
                # The server of forks ends only with this process, and then takes them along.
                (self.returncode,) = _STATUS.unpack(status) if status else (-signal.SIGKILL,)

    @override
    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


class Preloaded:
    """The server of forks of one role. Not for several threads."""

    def __init__(self, role: str) -> None:
        self._environment = dict(os.environ)
        ours, theirs = socket.socketpair()
        with theirs:
            # It ends when its socket is closed, which happens even if this process is killed.
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, role, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
            )
        self._control = ours

    def start(self, command: list[str], options: Mapping[str, Any]) -> Fork | None:
        """Start a command of `PROGRAMS`. Return None for what needs an interpreter of its own."""
        known = {"cwd", "env", "stdout", "stderr", "process_group"}
        if not known.issuperset(options) or self._differs(options.get("env", os.environ)):
            return None
        stdout, stderr = options.get("stdout"), options.get("stderr")
        if stdout in (None, subprocess.PIPE) or stderr in (None, subprocess.PIPE):
            return None
        files: list[Any] = [stdout, stdout if stderr == subprocess.STDOUT else stderr]
        theirs, status = socket.socketpair()
        request = {
            "argv": command[2:],
            "env": dict(options.get("env", os.environ)),
            "cwd": str(options.get("cwd", Path.cwd())),
            "process_group": options.get("process_group"),
        }
        content = json.dumps(request).encode()
        with theirs:
            handles = [theirs.fileno(), *(file.fileno() for file in files)]
            socket.send_fds(self._control, [struct.pack("I", len(content))], handles)
            self._control.sendall(content)
        (pid,) = _STATUS.unpack(self._control.recv(_STATUS.size, socket.MSG_WAITALL))
        return Fork(command, pid, status)

    def _differs(self, environment: Mapping[str, str]) -> bool:
        names = {
            name
            for name in environment.keys() | self._environment
            if name.startswith(_OF_INTERPRETER)
        }
        return any(environment.get(name) != self._environment.get(name) for name in names)


def role_of(command: Sequence[str]) -> str | None:
    """Return the role of a command that is run as a fork, or None."""
    if command[:2] != [sys.executable, "-m"] or command[2] not in PROGRAMS:
        return None
    role = "worker" if command[2] == "worker" else command[3]
    return role if role in _IMPORTED else None


def _serve(control: socket.socket) -> list[str]:
    """Fork for each request. Return in each fork, with its arguments; exit when the socket closes."""
    statuses: dict[int, socket.socket] = {}
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            _report(statuses)
        if control not in ready:
            continue
        head, handles, _, _ = socket.recv_fds(control, 4, 3)
        if not head:
            sys.exit()
        (length,) = struct.unpack("I", head)
        request = json.loads(control.recv(length, socket.MSG_WAITALL))
        server = os.getpid()
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (control, woken, waker, *statuses.values()):
                each.close()
            _become(request, handles, server)
            return list(request["argv"])
        statuses[pid] = socket.socket(fileno=handles[0])
        for handle in handles[1:]:
            os.close(handle)
        control.sendall(_STATUS.pack(pid))


def _report(statuses: dict[int, socket.socket]) -> None:
    """Send the exit codes of forks that have ended."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        # Its starter may have ended.
        with statuses.pop(pid) as starter, suppress(BrokenPipeError):
            starter.send(_STATUS.pack(os.waitstatus_to_exitcode(status)))


def _become(request: Mapping[str, Any], handles: list[int], server: int) -> None:
    """Give this fork what its starter asked for."""
    end_with(server)
    if request["process_group"] is not None:
        os.setpgid(0, request["process_group"])
    for handle in handles[1:]:
        os.dup2(handle, handles.index(handle))
    for handle in handles:
        os.close(handle)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])


def main() -> None:
    """Serve forks, and run the program in each."""
    role, control = sys.argv[1:]
    measuring.begin()
    for module in _IMPORTED[role]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    module, *arguments = _serve(socket.socket(fileno=int(control)))
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

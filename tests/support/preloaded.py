"""Processes of Sluice that start in a tenth of a second: forks of one that has imported their code.

    python -m tests.support.preloaded serve ROLE FOLDER LISTENER_FD
    python -m tests.support.preloaded python -c CODE

Importing a gateway takes three seconds of CPU time, importing vLLM fourteen, and a run of the tests
starts hundreds of gateways, workers and job runners. Each fork is a separate process, with the
environment, arguments, signals and exit of a program that was started by its command. `python`
replaces an interpreter: pytest-xdist starts its processes with it, and they have the modules of
tests imported too.

A run has one fork server for each role, which its first user starts and all processes of the run
share. It ends with the run. When a starter ends, its remaining forks get SIGTERM.
"""

import atexit
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from select import POLLIN, poll, select
from threading import Lock
from typing import Any, Final

from typing_extensions import override

from gateway.platform.concurrency.parent_death import end_with
from tests.support import measuring

_MODULE: Final = "tests.support.preloaded"
"""This module, whose name differs when it runs as a program."""

_MODELS: Final = ("tests.support.speech_model", "tests.support.vision_model")
"""Modules that write models."""
PROGRAMS: Final = (
    "gateway.cli.main",
    "worker",
    "tests.failures.chaos.program",
    "tests.failures.proofs.program",
    "tests.support.short_leases",
    "tests.support.long_timeouts",
    *_MODELS,
)
"""Modules that run as forks; any other command starts as usual."""
_IMPORTED: Final = {
    "beat": ("gateway.cli.jobs", "gateway.jobs.app"),
    "engine": (
        "worker.main",
        "worker.engine.vllm.engine",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.renderers.hf",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.engine.utils",
        "vllm.v1.structured_output.backend_guidance",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.llama",
    ),
    "gateway": ("gateway.cli.gateway", "gateway.process.server.serve"),
    "jobs": ("gateway.cli.jobs", "gateway.jobs.app", "gateway.jobs.runner"),
    "tests": (
        "gateway.platform.database.schema",
        "gateway.process.app",
        "gateway.jobs.runner",
        "hypothesis.strategies",
        "openai",
        "torch",
        "worker.main",
        "worker.samplers.batch",
    ),
    "worker": ("worker.main",),
}
"""By role. A process exports its modules' metrics, so each role has its own server."""
_READ_AT_START: Final = ("LD_", "PYTHON", "COVERAGE_", "OMP_", "VLLM_", "TORCH")
"""Prefixes of variables that the linker, an interpreter or a library reads at its start."""
_NUMBER: Final = struct.Struct("i")
_HANDLES: Final = 4
"""Of a request: the socket for the exit code, and standard input, output and error."""

_FOLDER_VARIABLE: Final = "SLUICE_TESTS_SERVERS"
"""The variable with the folder of the run's servers."""
_COLLECTED_VARIABLE: Final = "SLUICE_TESTS_COLLECTED"
"""The variable with the paths of the tests that run, in JSON."""
_RUN: Final = "run.lock"
_LOOK_SECONDS: Final = 1.0
"""How often a server checks whether the run has ended."""


@cache
def begin_run() -> Path:
    """Return the folder of this run's fork servers. It ends with the process that made it."""
    if _FOLDER_VARIABLE not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="sluice-servers-"))
        # The kernel releases the lock when this process ends, in any way.
        run = (folder / _RUN).open("ab")
        fcntl.flock(run, fcntl.LOCK_EX)
        atexit.register(lambda _: shutil.rmtree(folder, ignore_errors=True), run)
        os.environ[_FOLDER_VARIABLE] = str(folder)
    return Path(os.environ[_FOLDER_VARIABLE])


def prepare_tests(paths: Sequence[str]) -> None:
    """Let the processes of this run be forks of one that has imported the tests of these paths."""
    os.environ[_COLLECTED_VARIABLE] = json.dumps(paths)
    prepare("tests")


def prepare(role: str) -> Path:
    """Start the fork server of a role, if there is none. Return its address."""
    folder = begin_run()
    address = folder / role
    with (folder / f"{role}.lock").open("ab") as starting:
        fcntl.flock(starting, fcntl.LOCK_EX)
        if not address.exists():
            _start_server(role, folder)
    return address


class Fork(subprocess.Popen[bytes]):
    """A fork as its starter sees it. Its output goes to files: it has no pipes."""

    def __init__(self, command: list[str], pid: int, status: socket.socket) -> None:
        self.args = command
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        self._status = status.detach()
        self._reading = Lock()
        self._child_created = False  # Popen would wait for it, but it is no child of this process.

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
            # Another thread may have waited too.
            if self.returncode is None:
                status = os.read(self._status, _NUMBER.size)
                os.close(self._status)
                # The fork server ends only with this process, and then ends its forks.
                (self.returncode,) = _NUMBER.unpack(status) if status else (-signal.SIGKILL,)

    @override
    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            # Like Popen, ignore a process that has exited after `poll`.
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)


class Preloaded:
    """This process's connection to the fork server of one role. Not thread-safe."""

    def __init__(self, role: str) -> None:
        self._environment = dict(os.environ)
        self._log = _log_of(role, begin_run())
        self._control = socket.socket(socket.AF_UNIX)
        self._control.connect(str(prepare(role)))

    def start(self, command: list[str], options: Mapping[str, Any]) -> Fork | None:
        """Start a command of `PROGRAMS`, or return None if it needs its own interpreter."""
        known = {"cwd", "env", "stdin", "stdout", "stderr", "process_group"}
        if not known.issuperset(options) or self._differs(options.get("env", os.environ)):
            return None
        stdout, stderr = options.get("stdout"), options.get("stderr")
        if stdout in (None, subprocess.PIPE) or stderr in (None, subprocess.PIPE):
            return None
        theirs, status = socket.socketpair()
        request = {
            "argv": command[2:],
            "env": dict(options.get("env", os.environ)),
            "cwd": str(options.get("cwd", Path.cwd())),
            "process_group": options.get("process_group"),
        }
        content = json.dumps(request).encode()
        with theirs, Path(os.devnull).open("rb") as nothing:
            files: list[Any] = [options.get("stdin", nothing), stdout]
            files.append(stdout if stderr == subprocess.STDOUT else stderr)
            handles = [theirs.fileno(), *(file.fileno() for file in files)]
            try:
                socket.send_fds(self._control, [struct.pack("I", len(content))], handles)
                self._control.sendall(content)
                (pid,) = _NUMBER.unpack(self._control.recv(_NUMBER.size, socket.MSG_WAITALL))
            except (ConnectionError, struct.error) as error:
                raise RuntimeError(f"A fork server exited:\n{self._log.read_text()}") from error
        return Fork(command, pid, status)

    def _differs(self, environment: Mapping[str, str]) -> bool:
        names = {
            name
            for name in environment.keys() | self._environment
            if name.startswith(_READ_AT_START)
        }
        return any(environment.get(name) != self._environment.get(name) for name in names)


def _start_server(role: str, folder: Path) -> None:
    """Start the server of a role. Clients that connect wait for its imports."""
    # In its own session: Ctrl-C of pytest must not reach it.
    with _listen(role, folder) as listener, _log_of(role, folder).open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", _MODULE, "serve", role, str(folder), str(listener.fileno())],
            pass_fds=[listener.fileno()],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    server.returncode = 0  # It may outlive this process, which does not wait for it.


def _listen(role: str, folder: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / role))
    listener.listen()
    return listener


def _log_of(role: str, folder: Path) -> Path:
    return folder / f"{role}.log"


def role_of(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the role of a command that runs as a fork, or None."""
    if command[:2] != [sys.executable, "-m"] or command[2] not in PROGRAMS:
        return None
    if command[2] in _MODELS:
        return "engine"
    if command[2] != "worker":
        return command[3] if command[3] in _IMPORTED else None
    return "worker" if environment.get("SLUICE_ENGINE") == "scripted" else "engine"


@dataclass(frozen=True, slots=True)
class _Started:
    """A fork of a server."""

    starter: socket.socket
    status: socket.socket
    """Receives its exit code."""


class _Server:
    """Forks for each request; exits when the run has ended."""

    def __init__(self, listener: socket.socket, run: int) -> None:
        self._listener = listener
        self._run = run
        self._starters: set[socket.socket] = set()
        self._forks: dict[int, _Started] = {}
        self._woken, self._waker = socket.socketpair()

    def serve(self) -> list[str]:
        """Return in each fork, with its arguments."""
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            ready, _, _ = select(
                [self._listener, self._woken, *self._starters], [], [], _LOOK_SECONDS
            )
            for each in ready:
                if each is self._listener:
                    self._starters.add(self._listener.accept()[0])
                elif each is self._woken:
                    self._woken.recv(4096)
                    self._report()
                elif arguments := self._answer(each):
                    return arguments
            if not ready and self._is_over():
                os._exit(0)  # Libraries that vLLM imports report leaks at exit.

    def _is_over(self) -> bool:
        with suppress(BlockingIOError):
            fcntl.flock(self._run, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        return False

    def _answer(self, starter: socket.socket) -> list[str] | None:
        """Fork for a request, and return its arguments in the fork. End forks of ended starters."""
        head, handles, _, _ = socket.recv_fds(starter, _NUMBER.size, _HANDLES)
        if not head:
            self._starters.remove(starter)
            starter.close()
            for pid, fork in self._forks.items():
                if fork.starter is starter:
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)  # A test may have stopped it.
            return None
        request = json.loads(starter.recv(_NUMBER.unpack(head)[0], socket.MSG_WAITALL))
        server, pid = os.getpid(), os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._run)
            statuses = [fork.status for fork in self._forks.values()]
            for each in (self._listener, self._woken, self._waker, *self._starters, *statuses):
                each.close()
            _become(request, handles, server)
            return list(request["argv"])
        self._forks[pid] = _Started(starter, socket.socket(fileno=handles[0]))
        for handle in handles[1:]:
            os.close(handle)
        starter.sendall(_NUMBER.pack(pid))
        return None

    def _report(self) -> None:
        """Send the exit codes of forks that have ended."""
        while self._forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            fork = self._forks.pop(pid, None)
            if fork is None:
                continue  # The server of gateways, which has no starter.
            # Its starter may have ended.
            with fork.status as starter, suppress(BrokenPipeError):
                starter.send(_NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _become(request: Mapping[str, Any], handles: list[int], server: int) -> None:
    """Set up this fork as its starter requested."""
    end_with(server)
    if request["process_group"] is not None:
        os.setpgid(0, request["process_group"])
    for number, handle in enumerate(handles[1:]):
        os.dup2(handle, number)
    for handle in handles:
        os.close(handle)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])


def fork_engine_cores() -> None:
    """Let the engine cores that this process starts be its forks.

    On CPUs, vLLM lets a core import everything again, since a fork would lack the threads of
    OpenMP. Tests have none. It also inspects the class of each model that the machine has not seen
    in a new process, which imports everything: 11 s of CPU time, to initialise no GPU here.
    """
    _import("engine")
    from vllm.model_executor.models import registry
    from vllm.v1.engine import utils

    registry._run_in_subprocess = lambda inspect: inspect()
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    gc.freeze()  # Each core collects garbage five times during its start.


class _ModulesOnly:
    """A plugin of pytest that collects modules of tests and nothing in them."""

    def pytest_pycollect_makeitem(self) -> list[object]:
        return []


def _import_tests() -> None:
    """Import the modules of the tests as pytest does; their assertions are rewritten."""
    import pytest

    # Quiet twice, so that nothing reports progress.
    paths = json.loads(os.environ[_COLLECTED_VARIABLE])
    pytest.main(["-qq", "--collect-only", *paths], plugins=[_ModulesOnly()])


def _import(role: str) -> None:
    for module in _IMPORTED[role]:
        importlib.import_module(module)


def _serve(role: str, folder: Path, listening: int) -> None:
    """Serve forks until the run has ended, and run the program in each."""
    run = os.open(folder / _RUN, os.O_RDONLY)
    listener = socket.socket(fileno=listening)
    measuring.begin()
    if role == "tests":
        # They import all that gateways do.
        gateways = _listen("gateway", folder)
        _import("gateway")
        if os.fork():
            gateways.close()
        else:
            listener.close()
            role, listener = "gateway", gateways
            with _log_of(role, folder).open("wb") as output:
                for stream in (sys.stdout, sys.stderr):
                    os.dup2(output.fileno(), stream.fileno())
    if role == "engine":
        fork_engine_cores()
    _import(role)
    if role == "tests":
        _import_tests()
    gc.collect()
    gc.freeze()
    module, *arguments = _Server(listener, run).serve()
    if module == "-c":
        exec(arguments[0], {"__name__": "__main__"})
        return
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _stand_in(code: str) -> int:
    """Run code in a fork with this process's standard input and output. Return its exit code."""
    files = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
    server = Preloaded("tests")  # The fork ends when this connection is closed.
    fork = server.start([sys.executable, "-m", "-c", code], files)
    if fork is None:
        os.execv(sys.executable, [sys.executable, "-u", "-c", code])
    # Readers of the fork's output must see its end.
    for file in (sys.stdin, sys.stdout):
        os.close(file.fileno())
    return fork.wait()


def main() -> None:
    """Run the command line."""
    match sys.argv[1:]:
        case ["serve", role, folder, listening]:
            _serve(role, Path(folder), int(listening))
        case ["python", *_, code]:
            os._exit(_stand_in(code) & 0xFF)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()

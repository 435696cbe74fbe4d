"""Children of a supervisor: started, watched, restarted, and all of them ended."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from gateway.platform.settings import Settings
from gateway.process.supervision import processes
from gateway.process.supervision import supervisor as module
from gateway.process.supervision.supervisor import (
    ChildDiedError,
    ChildSpec,
    Supervisor,
    describe_exit,
)
from gateway.records.errors import StartupError
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import is_alive, wait_until

STEADY = "import time; print('up', flush=True); time.sleep(600)"
# A blocked signal stays pending; a handler's could come just before the sleep and not end it.
BLOCKED = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); "
STUBBORN = (
    BLOCKED + "print('up', flush=True); signal.sigwait({signal.SIGTERM}); "
    "print('asked', flush=True); time.sleep(600)"
)
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}])
print("child", child.pid, flush=True)
time.sleep(600)
"""


def _spec(
    folder: Path, name: str, program: str, *, stop_seconds: float = PATIENCE_SECONDS
) -> ChildSpec:
    return ChildSpec(
        name=name,
        command=(sys.executable, "-c", program),
        log=folder / f"{name}.log",
        stop_seconds=stop_seconds,
    )


async def _until_logged(spec: ChildSpec, text: str) -> str:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while text not in _logged(spec):
            await asyncio.sleep(0.01)
    return _logged(spec)


def _logged(spec: ChildSpec) -> str:
    assert spec.log is not None
    return spec.log.read_text() if spec.log.exists() else ""


async def _never() -> None:
    await asyncio.Event().wait()


async def test_children_have_their_own_process_groups_and_end_with_stop(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(said.append)
    specs = [_spec(tmp_path, name, STEADY) for name in ("one", "two")]
    await supervisor.start(specs)
    pids = [child.pid for child in supervisor._children[0]]
    assert [os.getpgid(pid) for pid in pids] == pids
    assert os.getpgid(0) not in pids
    for spec in specs:
        await _until_logged(spec, "up")
    await supervisor.stop()
    assert not any(is_alive(pid) for pid in pids)
    assert said == []


async def test_children_are_stopped_in_reverse_order_of_their_start(tmp_path: Path) -> None:
    program = (
        BLOCKED + "print('up', flush=True); signal.sigwait({signal.SIGTERM}); "
        "time.sleep(0.1); print('ended', time.monotonic(), flush=True)"
    )
    supervisor = Supervisor(print)
    specs = [_spec(tmp_path, name, program) for name in ("redis", "worker", "gateway")]
    for spec in specs:
        await supervisor.start([spec])
        await _until_logged(spec, "up")
    await supervisor.stop()
    ends = [float(_logged(spec).split()[-1]) for spec in specs]
    # Each one takes a while, and the next one is stopped when it has ended.
    assert ends[0] - ends[1] >= 0.1
    assert ends[1] - ends[2] >= 0.1


async def test_child_that_does_not_stop_in_time_is_killed(tmp_path: Path) -> None:
    supervisor = Supervisor(print)
    spec = _spec(tmp_path, "stubborn", STUBBORN, stop_seconds=0.3)
    await supervisor.start([spec])
    await _until_logged(spec, "up")
    pid = supervisor._children[0][0].pid
    began = time.monotonic()
    await supervisor.stop()
    assert time.monotonic() - began >= 0.3
    assert not is_alive(pid)


async def test_kill_cuts_a_slow_stop_short(tmp_path: Path) -> None:
    supervisor = Supervisor(print)
    spec = _spec(tmp_path, "stubborn", STUBBORN, stop_seconds=600)
    await supervisor.start([spec])
    await _until_logged(spec, "up")
    stopping = asyncio.create_task(supervisor.stop())
    await _until_logged(spec, "asked")
    supervisor.kill()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await stopping


async def test_death_during_the_start_is_reported_with_the_end_of_the_log(tmp_path: Path) -> None:
    supervisor = Supervisor(print)
    program = "print('port 80 is taken'); raise SystemExit(3)"
    await supervisor.start([_spec(tmp_path, "gateway", program)])
    with pytest.raises(ChildDiedError) as caught:
        await supervisor.while_alive(asyncio.create_task(_never()))
    message = str(caught.value)
    assert message.startswith("The gateway did not start (exit status 3).")
    assert "    port 80 is taken" in message
    assert str(tmp_path / "gateway.log") in message
    await supervisor.stop()


async def test_child_inherits_open_files_and_without_a_log_the_output() -> None:
    reading, writing = os.pipe()
    program = f"import os; os.write({writing}, b'inherited'); raise SystemExit(3)"
    spec = ChildSpec(
        name="gateway",
        command=(sys.executable, "-c", program),
        descriptors=(writing,),
        stop_seconds=1,
    )
    supervisor = Supervisor(print)
    await supervisor.start([spec])
    with pytest.raises(ChildDiedError, match=r"^The gateway did not start \(exit status 3\)\.$"):
        await supervisor.while_alive(asyncio.create_task(_never()))
    assert await supervisor.stop() == [3]
    assert os.read(reading, 100) == b"inherited"
    os.close(reading)
    os.close(writing)


async def test_port_in_use_is_named_before_any_process_starts() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        message = rf"^SLUICE_PORT: cannot listen on 127\.0\.0\.1:{port} \(.*in use.*\)\.$"
        with pytest.raises(StartupError, match=message):
            await processes.run_gateways(Settings(port=port, processes=2), (), {})


async def test_operators_ports_beyond_the_last_one_are_refused() -> None:
    settings = Settings(port=0, processes=3, operator_port=65534)
    with pytest.raises(StartupError, match=r"3 processes .* from 65534 on, .* last port is 65535"):
        await processes.run_gateways(settings, (), {})


async def test_one_of_several_processes_ends_if_its_loop_is_stuck() -> None:
    stuck = await asyncio.create_subprocess_exec(sys.executable, "-c", STUCK, stderr=PIPE)
    _, errors = await asyncio.wait_for(stuck.communicate(), PATIENCE_SECONDS)
    assert stuck.returncode == 1
    assert b"Timeout" in errors
    assert b"in held" in errors, "the code that holds the loop"


async def test_program_that_does_not_exist_is_a_death_during_the_start(tmp_path: Path) -> None:
    supervisor = Supervisor(print)
    spec = ChildSpec(
        name="ghost", command=("/no/such/program",), log=tmp_path / "ghost.log", stop_seconds=1
    )
    await supervisor.start([spec])
    with pytest.raises(ChildDiedError, match="/no/such/program"):
        await supervisor.while_alive(asyncio.create_task(_never()))
    await supervisor.stop()


async def test_child_that_ends_later_is_started_again_with_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_RESTART_SECONDS", 0.05)
    said: list[str] = []
    supervisor = Supervisor(said.append)
    supervisor.settle()
    await supervisor.start([_spec(tmp_path, "worker", "raise SystemExit(70)")])
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(said) < 3:
            await asyncio.sleep(0.01)
    await supervisor.stop()
    assert "The worker exited (exit status 70)" in said[0]
    assert [text.split("restarting it in ")[1].split(" s.")[0] for text in said[:3]] == [
        "0.05",
        "0.1",
        "0.2",
    ]


async def test_configuration_is_read_from_standard_input(tmp_path: Path) -> None:
    spec = ChildSpec(
        name="reader",
        command=(sys.executable, "-c", "import sys; print(sys.stdin.read()[::-1])"),
        configuration="password",
        environment={"NAME": "hidden"},
        log=tmp_path / "reader.log",
        stop_seconds=1,
    )
    assert "password" not in repr(spec)
    assert "hidden" not in repr(spec)
    supervisor = Supervisor(print)
    await supervisor.start([spec])
    await _until_logged(spec, "drowssap")
    await supervisor.stop()


STUCK = """
import asyncio
import time
from types import SimpleNamespace

import uvicorn

from gateway.process.server import graceful
from gateway.process.supervision.processes import OneOfMany
from gateway.platform.settings import Settings

def held():
    time.sleep(600)

async def run():
    config = uvicorn.Config(None)
    app = SimpleNamespace(state=SimpleNamespace(drain=None))
    one = OneOfMany(number=1, customers=[], serving=0)
    server = graceful.GracefulServer(config, app, Settings(), operators=None, one=one)
    graceful.STUCK_SECONDS = 600
    await server.on_tick(0)
    graceful.STUCK_SECONDS = 0.1
    await server.on_tick(graceful.TICKS)
    held()

asyncio.run(run())
"""

SUPERVISED = """
import asyncio, sys
from pathlib import Path
from gateway.process.supervision import supervisor as supervision
from gateway.process.supervision.supervisor import ChildSpec, Supervisor
from gateway.platform.concurrency.parent_death import adopt_orphans

supervision.ORPHAN_SECONDS = 0.3

async def main():
    adopt_orphans()
    supervisor = Supervisor(print)
    spec = ChildSpec(name="parent", command=(sys.executable, "-c", sys.argv[1]),
                     log=Path("parent.log"), stop_seconds=60)
    await supervisor.start([spec])
    print("pid", supervisor._children[0][0].pid, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await supervisor.stop()

asyncio.run(main())
"""


@pytest.fixture
def supervised(tmp_path: Path) -> "subprocess.Popen[str]":
    """A process that supervises a child until it reads a line."""
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISED, PARENT],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _pids(process: "subprocess.Popen[str]", log: Path) -> tuple[int, int]:
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    # They write concurrently.
    wait_until(
        lambda: {"up\n", "child "} <= {*re.findall(r"up\n|child ", log.read_text())},
        what="the grandchild being up",
    )
    return child, int(log.read_text().split("child ")[1].split()[0])


def test_orphans_of_a_child_are_ended_too(
    supervised: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    with supervised:
        child, grandchild = _pids(supervised, tmp_path / "parent.log")
        supervised.communicate("stop\n", timeout=PATIENCE_SECONDS)
    assert supervised.returncode == 0
    assert not Path(f"/proc/{child}").exists()
    wait_until(lambda: not Path(f"/proc/{grandchild}").exists(), what="the grandchild being reaped")


def test_child_ends_when_the_supervisor_is_killed(
    supervised: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    with supervised:
        child, grandchild = _pids(supervised, tmp_path / "parent.log")
        assert is_alive(child)
        supervised.kill()
    try:
        wait_until(lambda: not is_alive(child), what="the child's end")
    finally:
        os.kill(grandchild, signal.SIGKILL)


WORDS = {
    0: "exit status 0",
    1: "exit status 1",
    -9: "killed by SIGKILL",
    -62: "killed by signal 62",
}
"""Descriptions of exit statuses."""


def test_exit_status_in_words() -> None:
    assert {status: describe_exit(status) for status in WORDS} == WORDS

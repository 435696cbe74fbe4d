"""`sluice up`, for real: Redis, SQLite, gateways, and a worker with the scripted engine.

By default, it runs on the newest supported Python that is installed. Long runs use that of all
other tests.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from http.client import SERVICE_UNAVAILABLE
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import redis

from contract import keys
from gateway.cli.launch.launch_plan import find_ports, require_ports
from gateway.platform.env_file import EnvFile, LiveEnvFile
from gateway.records.errors import StartupError
from gateway.records.usage_record import UsageRecord, encode_usage
from tests.gateway.cli.conftest import Sluice
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import free_port, is_alive, wait_until
from tests.support.stack import REPOSITORY, http_status
from tests.support.usage import usage_record

NEWEST = REPOSITORY / ".venv" / "newest" / "bin" / "python"
"""Has the gateway on a newer Python than that of the other tests (scripts/setup.sh newest)."""

START_SECONDS = 240
"""Timeout in seconds; only a failure takes that long."""


class Up:
    """One `sluice up` in a separate folder."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder = folder
        self._python = python
        self.demo = folder / ".sluice" / "demo.env"
        self._out = folder / "out.txt"
        self.process: subprocess.Popen[bytes] | None = None
        self.gateways = 1

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [self._python, "-m", "gateway.cli.main", "up", "--engine", "scripted"]
        # Other tests may use the default ports at the same time.
        operator_port = first_port(self.gateways)
        command += ["--operator-port", str(operator_port), *arguments]
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return self.process

    def start_and_wait(self, *arguments: str) -> dict[str, str]:
        process = self.start(*arguments)
        wait_until(
            lambda: "Try it:" in self.output or process.poll() is not None,
            seconds=START_SECONDS,
            what="sluice up answering",
        )
        assert process.poll() is None, self.output
        return self.variables

    @property
    def output(self) -> str:
        return self._out.read_text()

    @property
    def variables(self) -> dict[str, str]:
        lines = self.demo.read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def children(self, text: str = "") -> list[int]:
        """Processes that the supervisor started and whose command has `text` in it."""
        assert self.process is not None
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _parent(entry) == self.process.pid:
                # It may have ended since.
                with suppress(FileNotFoundError, ProcessLookupError):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if text in command:
                        found.append(int(entry.name))
        return found

    @property
    def processes(self) -> int:
        """The number of processes, with Redis, a worker, and the two of the background jobs."""
        return self.gateways + 4

    def await_everything(self) -> None:
        """Wait until all processes run again, and requests are answered."""
        wait_until(
            lambda: len(self.children()) == self.processes and _completes(self.variables),
            seconds=START_SECONDS,
            what="everything being there again",
        )

    def kill(self) -> None:
        """End the supervisor, if it runs, by SIGKILL."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal, wait for the end, and prove that no process is left."""
        assert self.process is not None
        children = self.children()
        assert children
        self.process.send_signal(number)
        status = self.process.wait(START_SECONDS)
        assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
        return status


def first_port(number: int) -> int:
    """Return the first of consecutive free ports, without holding them."""
    with ExitStack() as held:
        port: int = find_ports(free_port(), number, held=held)[0].getsockname()[1]
        return port


def _browser() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.HTTPCookieProcessor())


def _page(link: str, browser: urllib.request.OpenerDirector | None = None) -> str:
    """Return the title of the page that a link leads to, by default in a new browser."""
    with (browser or _browser()).open(link, timeout=PATIENCE_SECONDS) as response:
        text: str = response.read().decode()
    return text.partition("<title>")[2].partition("</title>")[0]


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path)
    yield up
    up.kill()


def _request(variables: dict[str, str], body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(
        f"{variables['SLUICE_URL']}/v1/completions",
        data=json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {variables['SLUICE_KEY']}",
            "Content-Type": "application/json",
        },
    )


def _completes(variables: dict[str, str]) -> bool:
    """Whether a request is served now; a gateway may ask its client to retry."""
    body = {"model": variables["SLUICE_MODEL"], "prompt": "Hi", "max_tokens": 3}
    try:
        with urllib.request.urlopen(_request(variables, body), timeout=PATIENCE_SECONDS):
            return True
    except OSError:
        return False


def _await_completion(variables: dict[str, str]) -> None:
    wait_until(lambda: _completes(variables), what="a response")


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Up]:
    """A worker that is slow enough to be killed under streams, and a gateway; two in long runs.

    The last test ends them.
    """
    is_long = request.config.getoption("--long")
    python = sys.executable if is_long or not NEWEST.exists() else str(NEWEST)
    up = Up(tmp_path_factory.mktemp("up"), python)
    up.gateways = 2 if is_long else 1
    more = ("--port", str(first_port(up.gateways)), "--gateways", str(up.gateways))
    up.start_and_wait(*more, "--", "--scripted-step-seconds", "0.02")
    yield up
    up.kill()


@pytest.mark.skipif(not NEWEST.exists(), reason="not installed (scripts/setup.sh newest)")
def test_newest_python_is_newer(running: Up, request: pytest.FixtureRequest) -> None:
    [gateway] = running.children("gateway.cli.main gateway")[:1]
    newest = Path(f"/proc/{gateway}/exe").resolve() == NEWEST.resolve()
    assert newest != request.config.getoption("--long")
    assert NEWEST.resolve() != Path(sys.executable).resolve()


def test_everything_starts_and_serves_requests(running: Up) -> None:
    variables = running.variables
    port = int(variables["SLUICE_URL"].removeprefix("http://127.0.0.1:"))
    assert variables["SLUICE_MODEL"] == "sluice-tiny"
    assert stat.S_IMODE(running.demo.stat().st_mode) == 0o600
    assert stat.S_IMODE(running.demo.parent.stat().st_mode) == 0o700
    [curl] = [line for line in running.output.splitlines() if line.startswith("curl ")]
    answer = subprocess.run(
        # A busy gateway asks its clients to retry.
        ["/bin/sh", "-c", f"{curl} -sS --retry 60 --retry-max-time 90"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert '"text_completion"' in answer.stdout, answer.stderr
    [operators] = re.findall(r"Operators  (\S+)", running.output)
    assert http_status(f"{operators}/metrics") == 200
    assert http_status(f"{variables['SLUICE_URL']}/metrics") == 404
    assert variables["SLUICE_KEY"] in running.output
    links = re.findall(r"http\S+/console/enter\?token=\S+", running.output)
    assert [link.startswith(operators) for link in links] == [False, True]
    for link in links:
        browser = _browser()
        assert _page(link, browser) == "Overview · Sluice"
        # It logs in once; the browser that is logged in may load it again.
        assert _page(link, browser) == "Overview · Sluice"
        with pytest.raises(urllib.error.HTTPError, match="401") as used:
            _page(link)
        with used.value as refusal:
            assert "run `sluice console link`" in refusal.read().decode()
    logs = "".join(log.read_text() for log in (running.demo.parent / "logs").iterdir())
    assert variables["SLUICE_KEY"][16:] not in logs
    assert len(running.children()) == running.processes
    assert len(running.children("gateway.cli.main gateway")) == running.gateways
    assert len(running.children("-m worker")) == 1
    for each in range(port, port + running.gateways):
        _await_completion({**variables, "SLUICE_URL": f"http://127.0.0.1:{each}"})
    for name in ("jobs", "beat"):
        log = (running.demo.parent / "logs" / f"{name}.log").read_text()
        assert "ERROR" not in log
        assert "Traceback" not in log


def test_other_commands_in_the_folder_manage_it(
    running: Up, sluice: Sluice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = running.demo.with_name("cli.env")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    explicit = sluice("tenants", "list")
    assert "schema is empty" in explicit.stderr, "the environment of the tests has priority"
    monkeypatch.delenv("SLUICE_REDIS_URL")
    monkeypatch.delenv("SLUICE_DATABASE_URL")
    monkeypatch.chdir(running.folder)
    [line] = [line for line in running.output.splitlines() if line.startswith("sluice keys")]
    created = sluice(*shlex.split(line)[1:])
    assert (created.exit_code, "key_" in created.stderr) == (0, True), created.output
    _await_completion({**running.variables, "SLUICE_KEY": created.stdout.strip()})
    models = sluice("models", "list", "--json")
    assert [each["model"] for each in json.loads(models.stdout)] == ["sluice-tiny"]
    assert models.stderr == ""
    assert sluice("aliases", "list").stdout.splitlines()[1].split()[:2] == ["demo", "sluice-tiny=1"]
    assert "$0.60 " in sluice("prices", "list").stdout
    adapters = json.loads(sluice("adapters", "list", "--tenant", "demo", "--json").stdout)
    assert [each["name"] for each in adapters] == ["golden", "blue"]
    hook = sluice("webhooks", "create", "--tenant", "demo", "http://127.0.0.1:9/hook")
    assert hook.exit_code == 0, hook.output
    for link in re.findall(r"http\S+", sluice("console", "link").stdout):
        assert _page(link) == "Overview · Sluice"
    script = running.demo.with_name("batch.sh")
    batch = subprocess.run(["/bin/sh", script], capture_output=True, text=True, check=True).stdout
    assert json.loads(batch)["endpoint"] == "/v1/completions"
    # One option is enough to use nothing of the file.
    other = sluice("models", "list", "--redis-url", "redis://127.0.0.1:1/0")
    assert (other.exit_code, "cli.env" in other.stderr) == (1, False)
    # A copy is not the file of a running process.
    copy = tmp_path / ".sluice" / "cli.env"
    copy.parent.mkdir()
    shutil.copy(file, copy)
    monkeypatch.chdir(tmp_path)
    assert "schema is empty" in sluice("tenants", "list").stderr


@pytest.mark.slow
def test_quickstart_of_operators_works_as_written(running: Up) -> None:
    page = (REPOSITORY / "docs" / "start-as-an-operator.md").read_text()
    here = page.partition("## 5. Deploy it with Grafana")[0]
    first, *shown = re.findall(r"^```sh\n(.*?)^```", here, re.MULTILINE | re.DOTALL)
    assert (first, len(shown)) == ("make run\n", 8)
    program = running.folder / ".venv" / "bin" / "sluice"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gateway.cli.main "$@"\n')
    program.chmod(0o700)
    [operators] = re.findall(r"Operators  (\S+)", running.output)
    script = "\n".join(["shopt -s expand_aliases", *shown])
    # What a person copies, and the address that `make run` has printed.
    for written, real in (
        ("KEY=sk-...", "KEY=$(grep -o '^sk-.*' printed)"),
        ("http://127.0.0.1:9463", operators),
    ):
        assert written in script
        script = script.replace(written, real)
    with (running.folder / "printed").open("w+") as printed:
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=running.folder,
            env={name: value for name, value in os.environ.items() if name[:7] != "SLUICE_"},
            stdout=printed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=4 * START_SECONDS,
        )
        printed.seek(0)
        text = printed.read()
    assert done.returncode == 0, (text, done.stderr)
    assert "200\n200\n200\n429\n" in text
    heading = next(line for line in here.splitlines() if line.startswith("FROM "))
    assert heading.split() in [line.split() for line in text.splitlines()]
    row = r"^20\d\d-.* UTC +3 +0 +\d+ +0 +60 +0 +\$0\.0000"
    assert re.search(row, text, re.MULTILINE), text
    assert '"requests":3,' in text


def test_second_start_in_the_same_folder_and_a_used_port_are_reported(
    running: Up, sluice: Sluice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = running.variables["SLUICE_URL"].rpartition(":")[2]
    monkeypatch.chdir(running.folder)
    second = sluice("up")
    assert second.exit_code == 1
    assert "is already running in this folder" in second.stderr
    # The first one continues.
    _await_completion(running.variables)
    monkeypatch.chdir(tmp_path)
    third = sluice("up", "--port", port)
    assert third.exit_code == 1
    assert f"Port {port} is in use. Choose another one with --port" in third.stderr
    fourth = sluice("up", "--operator-port", port)
    assert fourth.exit_code == 1
    assert f"Port {port} is in use. Choose another one with --operator-port" in fourth.stderr


@pytest.mark.slow
def test_streams_outlive_killed_workers_and_a_killed_redis(running: Up) -> None:
    undisturbed = Stream(running.variables).result()
    assert len(_text(undisturbed).split()) > 100
    streams = [Stream(running.variables) for _ in range(3)]
    for stream in streams:
        stream.grow()
    for worker in running.children("-m worker"):
        os.kill(worker, signal.SIGKILL)
        # They resume where they were.
        for stream in streams:
            stream.grow()
    [redis_server] = running.children("redis-server")
    os.kill(redis_server, signal.SIGKILL)
    for stream in streams:
        assert _text(stream.result()) == _text(undisturbed)
    running.await_everything()
    restarts = running.output.count("exited (killed by SIGKILL); restarting it in 1 s")
    assert restarts == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGTERM, "exit status 0")],
)
def test_gateway_that_ends_is_restarted(running: Up, number: signal.Signals, words: str) -> None:
    gateway = running.children("gateway.cli.main gateway")[0]
    os.kill(gateway, number)
    wait_until(
        lambda: gateway not in running.children(), seconds=START_SECONDS, what="the gateway's end"
    )
    running.await_everything()
    assert re.search(rf"gateway( [12])? exited \({words}\)", running.output)


def test_all_usage_is_in_the_ledger_after_the_end(running: Up) -> None:
    _append_usage(running, usage_record(1))
    assert running.stop() == 0
    assert running.output.endswith("All processes have stopped.\n")
    assert not running.demo.with_name("cli.env").exists()
    assert (usage_record(1).request_id,) in _rows(running, "SELECT request_id FROM usage_ledger")
    # Redis 7 has several files, in a folder.
    kept = (running.folder / ".sluice").rglob("appendonly.aof*")
    assert any(file.stat().st_size for file in kept)


@pytest.mark.long
def test_key_is_reused_while_it_works(running: Up) -> None:
    first = running.variables
    if running.children():
        assert running.stop() == 0
    second = running.start_and_wait("--port", str(free_port()))
    assert second["SLUICE_KEY"] == first["SLUICE_KEY"]
    assert len(running.children()) == 5
    _await_completion(second)
    for name in ("jobs", "beat"):
        log = (running.demo.parent / "logs" / f"{name}.log").read_text()
        assert "ERROR" not in log
        assert "Traceback" not in log


@pytest.mark.long
def test_key_that_does_not_work_is_replaced(running: Up) -> None:
    assert running.stop(signal.SIGTERM) == 0
    running.demo.write_text("SLUICE_KEY=sk-made-up\n")
    variables = running.start_and_wait("--port", str(free_port()))
    assert variables["SLUICE_KEY"] not in ("", "sk-made-up")
    _await_completion(variables)


@pytest.mark.long
def test_dead_supervisor_ends_every_process(running: Up) -> None:
    _kill_and_wait(running, 5)


@pytest.mark.long
def test_supervisor_killed_during_the_start_ends_its_processes(running: Up) -> None:
    """Kill it in the folder of an ended one, as soon as the last process exists."""
    if running.children():
        assert running.stop() == 0
    keys_before = _rows(running, "SELECT id FROM api_keys")
    running.start("--port", str(free_port()))
    wait_until(lambda: len(running.children()) == 5, seconds=START_SECONDS, what="the last process")
    _kill_and_wait(running, 5)
    assert _rows(running, "SELECT id FROM api_keys") == keys_before, "the earlier key is kept"


def _kill_and_wait(up: Up, number: int) -> None:
    """Kill the supervisor of a number of processes, which end with it."""
    children = up.children()
    assert len(children) == number
    up.kill()
    wait_until(
        lambda: not any(map(is_alive, children)),
        what="the children's end",
    )


def _rows(up: Up, query: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query."""
    with closing(sqlite3.connect(up.folder / ".sluice" / "sluice.db")) as database:
        return database.execute(query).fetchall()


def _append_usage(up: Up, record: UsageRecord) -> None:
    """Append a record as a gateway does, with the Redis password of a child process."""
    gateway = up.children("gateway.cli.main gateway")[0]
    variables = Path(f"/proc/{gateway}/environ").read_bytes().split(b"\0")
    url = next(v.split(b"=", 1)[1] for v in variables if v.startswith(b"SLUICE_REDIS_URL="))
    with redis.Redis.from_url(url.decode()) as client:
        stream = keys.usage(keys.bucket_of(record.tenant_id))
        client.xadd(stream, {"u": encode_usage(record)})


class Stream:
    """A long stream that is read in a separate thread."""

    def __init__(self, variables: dict[str, str]) -> None:
        body = {
            "model": variables["SLUICE_MODEL"],
            "prompt": "Hi",
            "seed": 7,
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
        }
        self._request = _request(variables, body)
        self._body: Future[str] = Future()
        self._events = 0
        Thread(target=self._read, daemon=True).start()

    def grow(self) -> None:
        """Wait until the stream grows or ends."""
        enough = self._events + 5
        wait_until(
            lambda: self._events >= enough or self._body.done(),
            what="more of a stream",
        )

    def result(self) -> str:
        """Wait for the whole body."""
        return self._body.result()

    def _open(self) -> Any:
        """Return the response; retry while a busy gateway asks for it."""
        while True:
            try:
                return urllib.request.urlopen(self._request, timeout=START_SECONDS)
            except urllib.error.HTTPError as refusal:
                with refusal:
                    if refusal.code != SERVICE_UNAVAILABLE:
                        raise
                    time.sleep(float(refusal.headers["retry-after"]))

    def _read(self) -> None:
        try:
            with self._open() as response:
                lines = []
                for line in response:
                    lines.append(line)
                    self._events += line.startswith(b"data:")
                self._body.set_result(b"".join(lines).decode())
        except Exception as error:  # Raised where the result is asked for.
            self._body.set_exception(error)


def _text(body: str) -> str:
    """Return the text of a stream, which must have come to its end."""
    assert "[DONE]" in body, body[-300:]
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in body.splitlines()
        if line.startswith("data: {")
    ]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.long
def test_model_that_cannot_be_loaded_ends_the_start(up: Up) -> None:
    process = up.start("--port", str(free_port()), "--model", "./no/such/model")
    assert process.wait(START_SECONDS) == 1
    assert "The worker did not start" in up.output
    assert "no/such/model" in up.output
    assert "Traceback" not in up.output
    assert not up.demo.exists()


@pytest.mark.long
def test_signal_during_the_start_leaves_nothing(up: Up) -> None:
    process = up.start("--port", str(free_port()))
    wait_until(lambda: "Loading the model" in up.output, seconds=START_SECONDS, what="the start")
    assert up.stop(signal.SIGHUP) == 0
    assert "Traceback" not in up.output
    assert not up.demo.exists()
    assert process.returncode == 0


def test_next_free_port_is_used_unless_one_was_requested() -> None:
    with socket.socket() as taken, ExitStack() as held:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert find_ports(port, 1, held=held)[0].getsockname()[1] > port
        # Another process on this machine may use the next lower port too.
        with pytest.raises(StartupError, match=f"Port ({port - 1}|{port}) is in use"):
            require_ports(port - 1, 2, held=held)


def test_shell_reads_variables_as_they_were_written(tmp_path: Path) -> None:
    file = EnvFile(tmp_path / "demo.env")
    assert file.read() == {}
    values = {"SLUICE_KEY": "sk-a", "SLUICE_MODEL": "it's a $model"}
    file.write(values)
    read = subprocess.run(
        ["/bin/sh", "-c", f'. {shlex.quote(str(file.path))}; echo "$SLUICE_MODEL"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert read.stdout == "it's a $model\n"
    assert file.read() == values
    assert [path.name for path in tmp_path.iterdir()] == ["demo.env"]


def test_file_that_others_may_read_is_refused(
    tmp_path: Path, sluice: Sluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".sluice").mkdir()
    file = LiveEnvFile(tmp_path / ".sluice" / "cli.env")
    file.write({"SLUICE_REDIS_URL": "redis://:hidden@127.0.0.1:1/0"})
    file.path.chmod(0o640)
    monkeypatch.delenv("SLUICE_REDIS_URL")
    monkeypatch.delenv("SLUICE_DATABASE_URL")
    try:
        refused = sluice("models", "list")
    finally:
        file.remove()
    assert refused.exit_code == 1
    assert f"The file {file.path} cannot be used: only its owner" in refused.stderr
    assert "hidden" not in refused.stderr

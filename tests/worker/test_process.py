"""The worker as a process: command line, health endpoints, signals, exit codes, the catalogue."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import SecretStr
from redis.asyncio import Redis
from typing_extensions import override

from contract import keys, messages
from contract.messages import Feature, GenerationJob, JobFinished, WorkerCard, WorkerState
from tests.support.cases import all_cases
from tests.support.patience import PATIENCE_SECONDS, PROCESS_PATIENCE_SECONDS
from tests.support.processes import free_port, is_free, spawn
from tests.support.redis_server import RedisServer
from tests.worker.conftest import MODEL, MODEL_FOLDER, Gateway, make_job
from worker.__main__ import command
from worker.chat_format import folder_templates
from worker.engine.base import EngineDeadError
from worker.engine.scripted import Script, ScriptedEngine
from worker.main import EXIT_ENGINE_DIED, EXIT_NOT_STARTED, LOADED, SLEEP, WAKE, serve
from worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
LONG = 2_000
"""Tokens that take twenty seconds."""


@contextlib.contextmanager
def worker_process(
    redis_server: RedisServer,
    *options: str,
    python: tuple[str, ...] = (sys.executable,),
    log: Path = Path(os.devnull),
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a worker with the scripted engine; options come last.

    With arguments of its own in `python`, it is not a fork.
    """
    with log.open("wb") as output:
        process = spawn(
            *python,
            "-m",
            "worker",
            f"--model-path={MODEL_FOLDER}",
            f"--model-name={MODEL}",
            f"--redis-url={redis_server.url}",
            "--scripted-step-seconds=0.01",
            "--worker-id=w1",
            *options,
            cwd=ROOT,
            env={**os.environ, "SLUICE_ENGINE": "scripted"},
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def ended(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a process to exit, and return its exit code."""
    return await asyncio.to_thread(process.wait, PATIENCE_SECONDS)


async def ready(gateway: Gateway) -> None:
    async with asyncio.timeout(PROCESS_PATIENCE_SECONDS):
        while not (await gateway.queue.status()).ready_workers:
            await asyncio.sleep(0.02)


async def get(port: int, path: str) -> tuple[int, str]:
    """Ask a worker's health endpoint; return status and body."""

    def fetched() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(fetched)


async def card_of(redis: Redis) -> WorkerCard | None:
    card: Any = await redis.get(keys.worker_card(MODEL, "w1"))
    return None if card is None else messages.decode_card(card)


async def drains(redis: Redis) -> None:
    """Wait until the worker announces that it takes no more jobs."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (card := await card_of(redis)) is None or card.state is not WorkerState.DRAINING:
            await asyncio.sleep(0.01)


async def test_ready_worker_is_in_the_catalogue(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    options = ("--context-window=512", "--max-sequences=7", "--dialect=llamacpp-2026")
    with worker_process(redis_server, *options):
        await ready(gateway)
        card = await card_of(redis)
        assert card is not None
        tokenizer: Any = await redis.get(keys.tokenizer(card.tokenizer_digest))
        assert card.chat is not None
        template: Any = await redis.get(keys.chat_template(card.chat.template_digest))
        known: Any = await redis.hget(keys.MODELS, MODEL)
    assert (card.state, card.engine) == (WorkerState.READY, "scripted")
    assert (card.context_window, card.max_sequences, card.vocabulary_size) == (512, 7, 2048)
    assert (card.bos_token_id, card.eos_token_ids) == (0, [1])
    assert (card.dialect, card.image_token) == ("llamacpp-2026", "")
    assert card.features == [Feature.CHAT, Feature.TOOLS, Feature.REASONING]
    assert (card.chat.tool_parser, card.chat.reasoning_parser) == ("hermes", "think")
    assert json.loads(zlib.decompress(template)) == folder_templates(MODEL_FOLDER)
    content = (MODEL_FOLDER / "tokenizer.json").read_bytes()
    assert zlib.decompress(tokenizer) == content
    assert card.tokenizer_digest == hashlib.sha256(content).hexdigest()
    assert messages.decode_card(known) == card


async def test_sigterm_drains_announces_and_exits_0(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    # The draining state lasts until the test cancels the other job.
    job, other = make_job(max_tokens=100), make_job(max_tokens=LONG)
    with worker_process(redis_server) as process:
        await ready(gateway)
        await gateway.begin(other, job)
        process.send_signal(signal.SIGTERM)
        await drains(redis)
        assert (await gateway.queue.status()).ready_workers == 0
        await gateway.finished(job)
        assert await gateway.queue.cancel(other.id, other.tenant)
        assert await ended(process) == 0
    assert isinstance(gateway.end(job), JobFinished)
    assert await card_of(redis) is None


async def test_second_signal_hands_back_at_once(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    job = make_job(max_tokens=LONG)
    with worker_process(redis_server) as process:
        await ready(gateway)
        await gateway.begin(job)
        process.send_signal(signal.SIGINT)
        await drains(redis)
        process.send_signal(signal.SIGINT)
        assert await ended(process) == 0
    assert [lost.job_id for lost in await gateway.queue.reclaim()] == [job.id]


async def gone(gateway: Gateway, job: GenerationJob) -> None:
    """Wait until the worker is gone, as gateways do, and its job is lost."""
    async with asyncio.timeout(PROCESS_PATIENCE_SECONDS):
        while not (workers := await gateway.queue.gone_workers()):
            await asyncio.sleep(0.01)
    assert workers == ["w1"]
    assert [lost.job_id for lost in await gateway.queue.reclaim()] == [job.id]


async def test_killed_process_loses_its_jobs_before_its_lease_expires(
    redis_server: RedisServer, gateway: Gateway
) -> None:
    job = make_job(max_tokens=LONG)
    with worker_process(redis_server, "--lease-seconds=600") as process:
        await ready(gateway)
        await gateway.begin(job)
        assert await gateway.queue.gone_workers() == []
        process.kill()
        await gone(gateway, job)


async def test_stopped_process_loses_its_jobs_and_serves_again_when_it_continues(
    redis: Redis, redis_server: RedisServer, gateway: Gateway
) -> None:
    job, other = make_job(max_tokens=LONG), make_job(max_tokens=5)
    with worker_process(redis_server) as process:
        await ready(gateway)
        await gateway.begin(job)
        process.send_signal(signal.SIGSTOP)
        await gone(gateway, job)
        assert (await gateway.queue.status()).ready_workers == 0
        assert await gateway.queue.cancel(job.id, job.tenant)
        process.send_signal(signal.SIGCONT)
        await ready(gateway)
        await gateway.enqueue(other)
        await gateway.finished(other)
        process.send_signal(signal.SIGTERM)
        assert await ended(process) == 0
    assert not await redis.exists(keys.watched_workers(MODEL))


async def test_health_endpoints(redis: Redis, redis_server: RedisServer, gateway: Gateway) -> None:
    port = free_port()
    with worker_process(redis_server, f"--health-port={port}") as process:
        await ready(gateway)
        assert (await get(port, "/healthz"))[0] == 200
        assert (await get(port, "/readyz"))[0] == 200
        assert (await get(port, "/other"))[0] == 404
        job = make_job(max_tokens=LONG)
        await gateway.begin(job)
        process.send_signal(signal.SIGTERM)
        await drains(redis)
        assert (await get(port, "/readyz"))[0] == 503
        assert (await get(port, "/healthz"))[0] == 200
        metrics = (await get(port, "/metrics"))[1]
    assert "sluice_worker_jobs_claimed_total 1.0" in metrics
    assert "sluice_worker_sequences_running 1.0" in metrics


async def test_no_prompt_text_in_the_log(
    redis_server: RedisServer, gateway: Gateway, tmp_path: Path
) -> None:
    job = make_job(max_tokens=5, stop=["secretstop"], prompt_token_ids=[987654321])
    log = tmp_path / "log"
    with worker_process(redis_server, "--log-level=DEBUG", log=log) as process:
        await ready(gateway)
        await gateway.enqueue(job)
        await gateway.finished(job)
        process.send_signal(signal.SIGTERM)
        assert await ended(process) == 0
    text = log.read_text()
    assert "Loading model demo" in text
    assert "is ready: demo with scripted; " in text
    assert "secretstop" not in text
    assert "987654321" not in text


async def test_engine_that_does_not_start_ends_the_process_with_1(
    redis_server: RedisServer, redis: Redis
) -> None:
    class Broken(ScriptedEngine):
        @override
        async def start(self) -> None:
            raise RuntimeError("no memory")

    settings = WorkerSettings(model_path=str(MODEL_FOLDER), redis_url=SecretStr(redis_server.url))
    assert await serve(settings, lambda: Broken(MODEL_FOLDER, Script())) == EXIT_NOT_STARTED


async def test_worker_of_another_class_than_required_does_not_start(
    redis_server: RedisServer, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    settings = WorkerSettings(
        model_path=str(MODEL_FOLDER),
        redis_url=SecretStr(redis_server.url),
        required_class="0123456789ab",
    )
    engine = ScriptedEngine(MODEL_FOLDER, Script())
    assert await serve(settings, lambda: engine) == EXIT_NOT_STARTED
    assert f"exactness class of this worker is {engine.info.exactness.digest}, but" in caplog.text
    assert "SLUICE_REQUIRED_CLASS is 0123456789ab" in caplog.text
    assert "engine: scripted" in caplog.text
    assert not await redis.exists(keys.workers("checkpoint"))


async def test_signal_while_loading_stops_the_process(
    redis_server: RedisServer, redis: Redis
) -> None:
    class Slow(ScriptedEngine):
        @override
        async def start(self) -> None:
            await asyncio.Event().wait()

    settings = WorkerSettings(
        model_path=str(MODEL_FOLDER),
        model_name=MODEL,
        model_aliases=("vendor/one", "two"),
        worker_id="w1",
        redis_url=SecretStr(redis_server.url),
    )
    serving = asyncio.create_task(serve(settings, lambda: Slow(MODEL_FOLDER, Script())))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (card := await card_of(redis)) is None:
            await asyncio.sleep(0.01)
    assert (card.state, card.context_window) == (WorkerState.LOADING, 2048)
    assert card.aliases == ["vendor/one", "two"]
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(serving, PATIENCE_SECONDS) == 0


class SleepsBadly(ScriptedEngine):
    """Hangs or fails where the test says: `hangs asleep`, `fails awake` or another pair."""

    def __init__(self, fault: str) -> None:
        super().__init__(MODEL_FOLDER, Script(can_sleep=fault != "cannot sleep"))
        self._fault = fault

    @override
    async def sleep(self) -> None:
        await self._misbehave("asleep")

    @override
    async def wake(self) -> None:
        await self._misbehave("awake")

    async def _misbehave(self, when: str) -> None:
        if self._fault == f"hangs {when}":
            await asyncio.Event().wait()
        elif self._fault == f"fails {when}":
            raise EngineDeadError("no memory")


SLEEPS: dict[str, tuple[bool, int]] = {
    "cannot sleep": (False, 0),
    "fails asleep": (False, EXIT_ENGINE_DIED),
    "hangs asleep": (False, EXIT_ENGINE_DIED),
    "fails awake": (True, EXIT_ENGINE_DIED),
    "hangs awake": (True, EXIT_ENGINE_DIED),
    "nothing": (True, 0),
}


@pytest.mark.slow
@all_cases(("fault", "sleeps", "code"), [(fault, *rest) for fault, rest in SLEEPS.items()])
async def test_hosts_worker_exits_if_it_cannot_sleep_or_wake(
    redis_server: RedisServer,
    redis: Redis,
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    sleeps: bool,
    code: int,
) -> None:
    port = free_port()
    settings = WorkerSettings(
        model_path=str(MODEL_FOLDER),
        model_name=MODEL,
        worker_id="w1",
        redis_url=SecretStr(redis_server.url),
        ends_with_input=True,
        stall_seconds=0.2,
        health_port=port,
    )

    async def announces(state: WorkerState) -> WorkerCard:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (card := await card_of(redis)) is None or card.state is not state:
                await asyncio.sleep(0.01)
        return card

    async def claimed() -> int:
        page = (await get(port, "/metrics"))[1]
        (count,) = re.findall(r"^sluice_worker_jobs_claimed_total (\S+)$", page, re.MULTILINE)
        return int(float(count))

    reading, writing = os.pipe()
    with os.fdopen(reading) as read_end, os.fdopen(writing, "wb", buffering=0) as host:
        monkeypatch.setattr(sys, "stdin", read_end)
        serving = asyncio.create_task(serve(settings, lambda: SleepsBadly(fault)))
        await announces(WorkerState.READY)
        job = make_job()
        await gateway.enqueue(job)
        await gateway.finished(job)
        assert await claimed()
        host.write(SLEEP + b"\n")
        if sleeps:
            await announces(WorkerState.SLEEPING)
            assert is_free(port)
            host.write(WAKE + b" 70.5\n")
        if fault == "nothing":
            await announces(WorkerState.READY)
            # Of another worker that had this port meanwhile, Prometheus has seen a smaller count.
            assert await claimed() == 0
            host.write(LOADED + b" 7.6\n")
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (await announces(WorkerState.READY)).load_seconds != 8:
                    await asyncio.sleep(0.01)
            another = make_job(tenant="charged")
            await gateway.enqueue(another)
            await gateway.finished(another)
            counters: Any = await redis.hgetall(keys.service_counters(MODEL))
            assert float(counters[b"charged"]) >= 70.5
            host.close()
        assert await asyncio.wait_for(serving, PATIENCE_SECONDS) == code


def test_help_names_every_setting_and_its_environment_variable() -> None:
    result = CliRunner().invoke(command, ["--help"], terminal_width=200)
    assert result.exit_code == 0
    for name, field in WorkerSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in result.output
        assert f"[SLUICE_{name.upper()}]" in result.output
        assert field.description


@all_cases(
    ("options", "message"),
    [
        (["--max-sequences=many"], "--max-sequences: Input should be a valid integer"),
        (["--model-path=/nowhere"], "/nowhere has no config.json"),
        (["--engine-arguments={"], "--engine-arguments: must be a JSON object\n"),
        (["--redis-url=redis://:pw@h:x"], "--redis-url: a port must be a number from 0 to 65535\n"),
        (["--engine=other"], "--engine: Input should be 'vllm' or 'scripted'"),
        (["--model-aliases=one,,two"], "model_aliases: a name must not be empty"),
        (["--model-aliases=one, two,one"], "Given twice: one"),
        (["--model-aliases=one", "--model-name=one"], "Given twice: one"),
        (["--lease-seconds=0"], "should be greater than or equal to 0.3. Given: '0'"),
        (["--max-adapter-rank=3"], "256, 320, 512. Given: '3'"),
        (
            ["--max-sequences=many", "--lease-seconds=0"],
            "an integer. Given: 'many'\n--lease-seconds: ",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_option_is_named(options: list[str], message: str) -> None:
    result = CliRunner().invoke(command, [f"--model-path={MODEL_FOLDER}", *options])
    assert result.exit_code == 2
    assert message in result.output


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_MODEL_PATH", str(MODEL_FOLDER))
    monkeypatch.setenv("SLUICE_ENGINE_ARGUMENTS", '{"tensor_parallel_size": 2}')
    monkeypatch.setenv("SLUICE_LEASE_SECONDS", "9")
    settings = WorkerSettings()
    assert settings.engine_arguments == {"tensor_parallel_size": 2}
    assert (settings.lease_ms, settings.job_lease_ms) == (9_000, 27_000)
    assert settings.served_name == "checkpoint"


@pytest.mark.parametrize(
    ("value", "aliases"),
    [("", ()), (" ", ()), ("one", ("one",)), ("vendor/one, two", ("vendor/one", "two"))],
)
def test_aliases_are_separated_by_commas(
    monkeypatch: pytest.MonkeyPatch, value: str, aliases: tuple[str, ...]
) -> None:
    monkeypatch.setenv("SLUICE_MODEL_ALIASES", value)
    assert WorkerSettings(model_path=str(MODEL_FOLDER)).model_aliases == aliases

"""Gateways that drain: which requests they finish, which they refuse, and how.

One of them has several processes, of which one is killed before.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from gateway.http.draining import Draining
from gateway.http.services import Services
from gateway.limits.reservations import Reservations
from gateway.platform.concurrency.fair_turns import LoopTurns
from gateway.platform.settings import Settings, load_settings
from gateway.process.app import create_app
from gateway.process.server.graceful import GracefulServer
from tests.failures.chaos.program import FAILING_LOOP
from tests.failures.outages.deployment import SLOW_STEP_SECONDS
from tests.failures.proofs.client import Answer, ask, request
from tests.failures.proofs.ledger import Books, open_books
from tests.failures.proofs.until import running, until
from tests.support.events import DONE, PREFIX
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import children, free_port, is_alive
from tests.support.stack import Stack, http_status, metric, running_stack

STREAM: dict[str, Any] = {"prompt": "x", "ignore_eos": True, "stream": True}
ENDLESS = {**STREAM, "max_tokens": 1900}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Redis, a worker and background jobs; each test starts the gateways that it stops."""
    with running_stack() as stack:
        stack.start_worker(
            SLUICE_ENGINE="scripted", SLUICE_SCRIPTED_STEP_SECONDS=str(SLOW_STEP_SECONDS)
        )
        stack.start_jobs()
        stack.start_beat()
        yield stack


@pytest.fixture
async def books(stack: Stack) -> AsyncIterator[Books]:
    """The stack's ledger and Redis."""
    async with open_books(stack) as books:
        yield books


async def start(stack: Stack, **environment: str) -> str:
    """Start a gateway named `leaving` and return its base URL."""
    stack.gateways.clear()
    key = await asyncio.to_thread(stack.key)
    url = await asyncio.to_thread(stack.start_gateway, "leaving", **environment)

    async def answers() -> bool:
        return (await ask(url, key, prompt="x", max_tokens=1)).status == 200

    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await answers():
            await asyncio.sleep(0.1)
    return url


async def begin(url: str, key: str, body: dict[str, Any]) -> "asyncio.Task[Answer]":
    """Send a request that runs for long."""
    return asyncio.create_task(ask(url, key, **body))


async def end(stack: Stack) -> int:
    """Wait for the gateway's exit and return its exit code."""
    return await asyncio.to_thread(stack.processes.pop("leaving").wait, 120)


def terminate(stack: Stack) -> None:
    """Send SIGTERM to the gateway."""
    stack.processes["leaving"].send_signal(signal.SIGTERM)


async def test_stop_waits_for_confirmed_settlements_within_the_drain_time() -> None:
    async def stop(seconds: float, *, confirmed_after: float) -> float:
        """Return how long the stop of a server without requests takes."""
        app, settlements = FastAPI(), SimpleNamespace(are_confirmed=False)
        app.state.drain, app.state.services = Draining(), {Reservations: settlements}
        config = uvicorn.Config(app, lifespan="off")
        config.load()
        settings = load_settings(drain_delay=0, drain_timeout=seconds)  # type: ignore[arg-type]
        server = GracefulServer(config, app, settings, operators=None, one=None)
        server.servers, server.lifespan = [], config.lifespan_class(config)
        asyncio.get_running_loop().call_later(
            confirmed_after, setattr, settlements, "are_confirmed", True
        )
        began = time.monotonic()
        await asyncio.wait_for(server.shutdown(), PATIENCE_SECONDS)
        return time.monotonic() - began

    least = await stop(1000.0, confirmed_after=0.0)
    assert least + 0.4 < await stop(1000.0, confirmed_after=least + 0.6)
    assert await stop(1.0, confirmed_after=1000.0) > 0.9


async def test_draining_gateway_finishes_its_requests_and_accepts_no_new_ones(
    stack: Stack, books: Books
) -> None:
    url, key = await start(stack), stack.key()
    stream = await begin(url, key, {**STREAM, "max_tokens": 250})
    whole = await begin(url, key, {**STREAM, "max_tokens": 250, "stream": False})
    address = urlsplit(url)
    idle, writer = await asyncio.open_connection(address.hostname, address.port)
    await running(stack, 2)
    terminate(stack)
    await until(lambda: http_status(f"{url}/readyz") == 0, what="refused connections")
    assert await asyncio.wait_for(idle.read(), PATIENCE_SECONDS) == b"", (
        "an idle connection is closed"
    )
    writer.close()
    operators = stack.operators_of(url)
    assert await asyncio.to_thread(http_status, f"{operators}/metrics") == 200
    assert await asyncio.to_thread(http_status, f"{operators}/readyz") == 503
    for answer in (await stream, await whole):
        assert answer.is_finished, answer.body[-300:]
    assert (await stream).body.rstrip().rpartition(b"\n\n")[2].startswith(DONE)
    assert await end(stack) == 0
    await books.settled()
    await books.nothing_left()


async def test_gateway_serves_unready_during_the_drain_delay_until_a_second_signal(
    stack: Stack, books: Books
) -> None:
    url = await start(stack, SLUICE_DRAIN_DELAY="600", SLUICE_DRAIN_TIMEOUT="600")
    key = stack.key()
    stream = await begin(url, key, ENDLESS)
    await running(stack, 1)
    async with httpx.AsyncClient(base_url=url) as client:
        assert "connection" not in (await client.get("/readyz")).headers
        terminate(stack)
        while (ready := await client.get("/readyz")).status_code == 200:
            await asyncio.sleep(0.01)
        assert (ready.status_code, ready.json()) == (503, {"status": "stopping"})
        assert ready.headers["connection"] == "close"
        for path in ("/health", "/ping"):
            probe = await client.get(path)
            assert (probe.status_code, probe.json()) == (503, {"status": "stopping"})
        assert (await client.get("/healthz")).status_code == 200
        answer = await ask(url, key, prompt="x", max_tokens=3)
        assert answer.is_finished, answer.body
        assert answer.headers["connection"] == "close"
    terminate(stack)
    assert (await stream).events[-1]["error"]["code"] == "gateway_stopping"
    assert await end(stack) == 0
    await books.settled()
    await books.nothing_left()


async def test_request_beyond_the_drain_timeout_ends_retryable_and_is_settled(
    stack: Stack, books: Books
) -> None:
    url = await start(stack, SLUICE_DRAIN_DELAY="0.5", SLUICE_DRAIN_TIMEOUT="1")
    key = stack.key()
    stream = await begin(url, key, ENDLESS)
    whole = await begin(url, key, {**ENDLESS, "stream": False})
    stalled = asyncio.create_task(
        request(url, key, {"model": "sluice-tiny", **ENDLESS}, stall_after=60)
    )
    await running(stack, 3)
    terminate(stack)
    [cut, refused] = [await stream, await whole]
    assert cut.is_complete, "the stream has an orderly end"
    error = cut.events[-1]["error"]
    assert (error["code"], error["type"]) == ("gateway_stopping", "service_unavailable")
    assert cut.body.count(PREFIX + b"[DONE]") == 1
    assert (refused.status, refused.error["code"]) == (503, "gateway_stopping")
    assert int(refused.headers["retry-after"]) >= 1
    assert await end(stack) == 0
    stalled.cancel()
    await books.settled()
    await books.nothing_left()
    rows = {row["request_id"]: row for row in await books.rows()}
    row = rows[str(cut.request_id)]
    assert (row["outcome"], row["code"]) == ("failed", "gateway_stopping")
    assert row["completion_tokens"] > row["free_completion_tokens"]
    assert "Traceback" not in stack.log("leaving")


async def test_gateway_with_a_failed_loop_drains_at_once_and_exits_with_an_error(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"SLUICE_DRAIN_TIMEOUT": "600", FAILING_LOOP: str(tmp_path / "bug")}
    monkeypatch.setattr(stack, "program", "tests.failures.chaos.program")
    url = await start(stack, **environment)
    stream = await begin(url, stack.key(), ENDLESS)
    await running(stack, 1)
    (tmp_path / "bug").touch()
    assert (await stream).events[-1]["error"]["code"] == "gateway_stopping"
    assert await end(stack) == 1


async def test_late_request_on_an_open_connection_gets_503_and_a_close() -> None:
    settings = Settings(redis_url=f"redis://127.0.0.1:{free_port()}")
    app: FastAPI = create_app(settings)
    app.state.drain.is_draining = app.state.drain.is_closed = True
    app.state.services = Services.of(LoopTurns(), settings)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "gateway_stopping"
        assert answer.headers["connection"] == "close"
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-request-id"]
        assert (await client.get("/healthz")).status_code == 200


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Keep a process from doing anything."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
async def test_processes_share_a_port_and_a_drain_and_survive_each_other(
    stack: Stack, books: Books
) -> None:
    environment = {"SLUICE_PROCESSES": "2", "SLUICE_DRAIN_TIMEOUT": "600"}
    url, key = await start(stack, **environment), stack.key()
    parent = stack.processes["leaving"].pid
    one, other = sorted(children(parent))
    of_one = urlsplit(stack.operators_of(url))
    assert of_one.port is not None
    of_both = of_one.geturl(), f"http://{of_one.hostname}:{of_one.port + 1}"

    def are_serving() -> bool:
        return all(http_status(f"{each}/healthz") for each in of_both)

    await until(are_serving, what="both processes")
    for busy, operators in zip((other, one), of_both, strict=True):
        # The other process accepts the connection, and counts the request.
        before = metric(operators, "sluice_gateway_requests_total")
        with stopped(busy):
            answer = await ask(url, key, prompt="x", max_tokens=3)
            assert answer.is_finished, answer.body
            assert metric(operators, "sluice_gateway_requests_total") == before + 1

    with stopped(other):
        completed = await ask(url, key, prompt="x", max_tokens=5)
        cut = await begin(url, key, ENDLESS)
        await running(stack, 1)
    calling = asyncio.create_task(call(url, has_restarted := asyncio.Event()))
    os.kill(one, signal.SIGKILL)
    assert not (await cut).is_complete
    os.kill(other, signal.SIGTERM)
    await until(
        lambda: not children(parent) & {one, other} and are_serving(),
        what="two new processes",
    )
    has_restarted.set()
    assert await calling <= {200, 503}, "no connection is reset or refused"
    log = stack.log("leaving")
    assert "gateway process 1 exited (killed by SIGKILL); restarting it" in log
    assert "gateway process 2 exited (exit status 0); restarting it" in log
    assert "[process 2]" in log

    await books.settled()
    rows = {row["request_id"]: row for row in await books.rows()}
    assert rows[str(completed.request_id)]["completion_tokens"] == 5
    one, other = children(parent)
    with stopped(one):
        stream = await begin(url, key, {**STREAM, "max_tokens": 250})
        await running(stack, 1)
    with stopped(other):
        endless = await begin(url, key, ENDLESS)
        await running(stack, 2)
    terminate(stack)
    await until(lambda: http_status(f"{url}/readyz") == 0, what="refused connections")
    for operators in of_both:
        assert await asyncio.to_thread(http_status, f"{operators}/metrics") == 200
    assert (await stream).is_finished, (await stream).body[-300:]
    terminate(stack)
    assert (await endless).events[-1]["error"]["code"] == "gateway_stopping"
    assert await end(stack) == 0
    assert not any(is_alive(pid) for pid in (one, other))
    await books.settled()


async def call(url: str, stop: asyncio.Event) -> set[int]:
    """Send requests, each on its own connection; return their statuses, 0 if a connection fails."""
    statuses = set()
    while not stop.is_set():
        statuses.add(await asyncio.to_thread(http_status, f"{url}/healthz"))
        await asyncio.sleep(0.02)  # It leaves the processor to the processes that start.
    return statuses

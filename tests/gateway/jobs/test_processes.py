"""`sluice jobs` and `sluice beat` as real processes: killed, stopped, and during outages."""

import asyncio
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from common.redis_url import redis_client
from contract import keys
from gateway.billing.exports.store import ExportStore
from gateway.jobs.app import FULL_SECONDS, MOST_WAITING, BoundedScheduler, create_app
from gateway.jobs.schedule import Track
from gateway.platform.database.engine import Database
from gateway.platform.settings import load_settings
from gateway.records.times import EPOCH, utc_now
from gateway.records.usage_record import encode_usage
from tests.support.billing import Billing, billing_in_thread
from tests.support.processes import spawn, stop, wait_until
from tests.support.redis_cluster import running_cluster
from tests.support.redis_server import BUNDLED, RedisServer, running_redis
from tests.support.usage import usage_record

END_SECONDS = 120.0
"""Only a failure takes that long."""
RECORDS = 3_000
"""Records whose drain takes several transactions."""
MOST_LATE_KILLS = 5
DRAIN_SECONDS = 60.0
"""Limit from the end of an outage of Redis until the ledger is complete."""
REPOSITORY = Path(__file__).parents[3]


@dataclass
class Deployment:
    """Redis, a database, and the processes that a test starts."""

    server: RedisServer
    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def database(self) -> Path:
        return self.folder / "sluice.db"

    def start(self, *command: str) -> "subprocess.Popen[bytes]":
        """Start `sluice COMMAND`."""
        environment = {
            "SLUICE_REDIS_URL": self.server.url,
            "SLUICE_DATABASE_URL": f"sqlite+aiosqlite:///{self.database}",
            **self.settings,
        }
        name = " ".join(command)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = spawn(
                *(sys.executable, "-m", "gateway.cli.main", *command),
                cwd=REPOSITORY,
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
            )
        self.processes[name] = process
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def append(self, first: int, count: int) -> None:
        """Append usage records in Redis."""
        with redis.Redis.from_url(self.server.url) as client:
            pipeline = client.pipeline(transaction=False)
            for number in range(first, first + count):
                pipeline.xadd(*_entry(number))
            pipeline.execute()

    def undrained(self) -> int:
        with redis.Redis.from_url(self.server.url) as client:
            return sum(int(client.xlen(keys.usage(bucket))) for bucket in range(keys.BUCKETS))

    def rows(self) -> int:
        """Return the number of rows of the ledger, which must have different requests."""
        with closing(sqlite3.connect(self.database, timeout=END_SECONDS)) as connection:
            count, requests = connection.execute(
                "SELECT count(*), count(DISTINCT request_id) FROM usage_ledger"
            ).fetchone()
        assert count == requests
        return int(count)

    def has(self, count: int) -> bool:
        """Whether the ledger has the first records, up to this number."""
        with closing(sqlite3.connect(self.database, timeout=END_SECONDS)) as connection:
            found = connection.execute(
                "SELECT count(*) FROM usage_ledger WHERE request_id < ?", (f"cmpl-{count:06}",)
            ).fetchone()
        return int(found[0]) == count

    def cost(self) -> int:
        """Return the cost of all rows."""
        with closing(sqlite3.connect(self.database, timeout=END_SECONDS)) as connection:
            row = connection.execute("SELECT sum(cost_micros) FROM usage_ledger").fetchone()
        return int(row[0])

    def register_sink(self, name: str) -> None:
        """Register a sink, or end the lease of a process that was killed."""

        async def register() -> None:
            database = Database(f"sqlite+aiosqlite:///{self.database}")
            async with database.writing() as transaction:
                row = await ExportStore(transaction).register(name, "openmeter", utc_now())
                row.leased_until = EPOCH
            await database.aclose()

        asyncio.run(register())


@pytest.fixture
def deployment(tmp_path: Path, copy_sqlite: Callable[[Path], str]) -> Iterator[Deployment]:
    with running_redis() as server:
        deployment = Deployment(server, tmp_path)
        copy_sqlite(deployment.database)
        yield deployment
        for process in deployment.processes.values():
            stop(process)


@pytest.fixture
def receiver() -> Iterator[Billing]:
    with billing_in_thread() as receiver:
        yield receiver


@pytest.mark.slow
def test_worker_killed_during_a_drain_or_an_export_loses_and_duplicates_nothing(
    deployment: Deployment, receiver: Billing, request: pytest.FixtureRequest
) -> None:
    kills = 3 if request.config.getoption("--long") else 1
    total = met = 0
    deployment.settings = {
        "SLUICE_EXPORT_SINKS": json.dumps(
            [{"name": "x", "kind": "openmeter", "url": receiver.url, "batch_size": 1000}]
        )
    }
    deployment.register_sink("x")
    deployment.start("beat")
    # On a busy machine a drain may end before it is killed, which proves nothing.
    for _ in range(kills + MOST_LATE_KILLS):
        deployment.append(total, RECORDS)
        total += RECORDS
        before = deployment.rows()
        jobs = deployment.start("jobs")
        wait_until(partial(_has_grown, deployment, before), what="a drain", longest_pause=0.01)
        jobs.kill()
        jobs.wait(END_SECONDS)
        met += deployment.undrained() > 0
        if met == kills:
            break
    else:
        pytest.fail(f"{met} kills met a drain")
    receiver.fates.append((True, -1, ""))

    def kill() -> None:
        deployment.processes["jobs"].kill()

    receiver.on_request = kill
    deployment.register_sink("x")
    deployment.start("jobs").wait(END_SECONDS)
    receiver.on_request = lambda: None
    deployment.register_sink("x")
    deployment.start("jobs")
    wait_until(lambda: deployment.undrained() == 0, what="the end of the drain")
    assert deployment.rows() == total
    wait_until(lambda: len(receiver.events) == total, what="the end of the export")
    assert receiver.cost() == deployment.cost()
    assert max(receiver.received.values()) > 1, "the batch of the killed process came again"
    assert "ERROR" not in deployment.log("jobs")


def _has_grown(deployment: Deployment, before: int) -> bool:
    return deployment.rows() > before


@pytest.fixture
def scheduler(deployment: Deployment) -> Iterator[BoundedScheduler]:
    """The scheduler of `sluice beat`, without a process that runs it."""
    app = create_app(load_settings(redis_url=deployment.server.url))
    scheduler = BoundedScheduler(app)
    yield scheduler
    scheduler.close()
    app.close()


def test_runs_do_not_accumulate_without_a_worker(
    deployment: Deployment, scheduler: BoundedScheduler
) -> None:
    with redis.Redis.from_url(deployment.server.url) as client:
        client.rpush(Track.LONG, *(["x"] * (MOST_WAITING - 2)))
        for _ in range(3):
            for entry in list(scheduler.schedule.values()):
                scheduler.apply_async(entry, advance=False)
        assert client.llen(Track.LONG) == MOST_WAITING
        assert client.llen(Track.LEDGER) == 6, "each track has its own queue"


def test_scheduler_sleeps_between_runs(scheduler: BoundedScheduler) -> None:
    ticks = 0
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        time.sleep(max(0.0, scheduler.tick()))
        ticks += 1
    runs = sum(entry.total_run_count for entry in scheduler.schedule.values())
    assert runs >= 3
    assert ticks <= 3 * runs + 5


@pytest.mark.slow
def test_full_and_stopped_redis_are_logged_once_and_sigterm_drains_all_usage(
    deployment: Deployment,
) -> None:
    names = "jobs --track ledger", "jobs --track long", "beat"
    jobs, long, beat = [deployment.start(*name.split()) for name in names]
    _drain(deployment, 0)
    # A full one rejects the start of runs, and what ends those that run.
    deployment.append(5, RECORDS)
    wait_until(lambda: deployment.rows() > 5, what="a drain", longest_pause=0.01)
    deployment.server.command("CONFIG SET maxmemory 1")
    wait_until(lambda: "rejects writes" in deployment.log("beat"), what="the complaint")
    time.sleep(3 * FULL_SECONDS)
    deployment.server.command("CONFIG SET maxmemory 0")
    _drain(deployment, 5 + RECORDS)
    assert (jobs.poll(), long.poll(), beat.poll()) == (None, None, None)
    for name in names:
        assert "Traceback" not in deployment.log(name)
        assert len(re.findall("OutOfMemory|rejects writes", deployment.log(name))) <= 1

    deployment.server.stop()
    complaint = "the broker cannot be reached"
    wait_until(lambda: complaint in deployment.log("beat"), what="the complaint")
    deployment.server.start()
    rows = deployment.rows()
    _drain(deployment, rows)
    assert (jobs.poll(), long.poll(), beat.poll()) == (None, None, None)
    assert deployment.log(names[0]).count("job drain failed and is retried") <= 1
    assert deployment.log("beat").count(complaint) == 1
    # Celery logs a traceback for a run that it could not confirm.
    reported = deployment.log(names[0])

    for process in (beat, long):
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_SECONDS) == 0
    deployment.append(rows + 5, 10)
    jobs.send_signal(signal.SIGTERM)
    assert jobs.wait(END_SECONDS) == 0
    assert deployment.undrained() == 0
    assert deployment.rows() == rows + 15
    logs = deployment.log(names[0]).removeprefix(reported) + deployment.log("beat")
    assert "Traceback" not in logs


@pytest.mark.slow
def test_restarts_of_redis_at_random_moments_leave_the_ledger_complete(
    deployment: Deployment, request: pytest.FixtureRequest
) -> None:
    is_long = request.config.getoption("--slow") or request.config.getoption("--long")
    with closing(RedisServer(BUNDLED, append="always")) as server:
        deployment.server = server
        server.start()
        draw = random.Random(62)

        def restart() -> None:
            time.sleep(draw.uniform(0.0, 3.0))
            draw.choice((server.kill, server.stop))()
            time.sleep(draw.uniform(0.0, 1.5))
            server.start()

        _write_during(deployment, [restart] * (20 if is_long else 3), deployment.append)


@pytest.mark.slow
def test_failovers_of_a_cluster_leave_the_ledger_complete(deployment: Deployment) -> None:
    """Celery has a Redis of its own then, which restarts meanwhile."""
    writing = threading.Lock()
    with running_cluster() as servers:
        deployment.settings = {
            "SLUICE_REDIS_URL": servers.url,
            "SLUICE_CELERY_BROKER_URL": deployment.server.url,
        }

        async def settle(first: int, count: int) -> None:
            async with redis_client(servers.url, socket_timeout=1.0) as client:
                for number in range(first, first + count):
                    await client.xadd(*_entry(number))

        def append(first: int, count: int) -> None:
            with writing:
                asyncio.run(settle(first, count))

        def fail_over(number: int) -> None:
            with writing:  # The replica would lack what is written now, and no process repeats it.
                servers.replicate(number)
                servers.fail_over(number)
            deployment.server.kill()
            deployment.server.start()

        outages = [partial(fail_over, number) for number in range(len(servers.masters))]
        _write_during(deployment, outages, append)


def _entry(number: int) -> tuple[str, dict[Any, Any]]:
    """Return the stream of a usage record, and its fields there."""
    record = usage_record(number, tenant_id=f"tenant-{number % 23}")
    return keys.usage(keys.bucket_of(record.tenant_id)), {"u": encode_usage(record)}


def _write_during(
    deployment: Deployment,
    outages: Sequence[Callable[[], None]],
    append: Callable[[int, int], None],
) -> None:
    """Settle requests during outages. The ledger must be complete within a minute of each."""
    jobs, beat = deployment.start("jobs"), deployment.start("beat")
    ended, written = threading.Event(), [0]

    def write() -> None:
        """Repeat each record until Redis confirms it, as gateways do."""
        while not ended.wait(0.02):
            with suppress(redis.RedisError):
                append(written[0], 5)
                written[0] += 5

    def await_all() -> None:
        has_all = partial(deployment.has, written[0])
        wait_until(has_all, what="the drain", seconds=DRAIN_SECONDS)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for outage in outages:
            outage()
            await_all()
    finally:
        ended.set()
        writer.join(END_SECONDS)
    await_all()
    assert deployment.rows() == written[0] > 0
    assert (jobs.poll(), beat.poll()) == (None, None)
    for process in (beat, jobs):
        stop(process)


def _drain(deployment: Deployment, rows: int) -> None:
    """Append some records, and wait until they are in the ledger."""
    deployment.append(rows, 5)
    wait_until(lambda: deployment.rows() == rows + 5, what="the drain")


def test_jobs_refuse_a_database_without_a_schema(tmp_path: Path, redis_server: RedisServer) -> None:
    deployment = Deployment(redis_server, tmp_path)
    assert deployment.start("jobs").wait(END_SECONDS) == 1
    assert "sluice db upgrade" in deployment.log("jobs")

"""The runner: tracks, one run at a time, outages, shutdown; and every scheduled job."""

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from celery import Celery
from celery.signals import task_received
from celery.worker import state
from kombu.exceptions import OperationalError
from kombu.transport.virtual import QoS
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.accounts.tenants.service import TenantService
from gateway.jobs import app as app_module
from gateway.jobs import runner as runner_module
from gateway.jobs.app import START, Intake, create_app, run_worker
from gateway.jobs.deployment_gauges import Observer
from gateway.jobs.runner import TrackRunner, running, stop_all
from gateway.jobs.schedule import TASKS, JobServices, Task, Track
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.settings import Settings, load_settings
from gateway.records.errors import StoreUnavailableError
from tests.support.cases import case
from tests.support.kinds import every_database
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import wait_until
from tests.support.redis_server import RedisServer, running_redis


@pytest.fixture
def settings(
    tmp_path: Path, redis_server: RedisServer, copy_sqlite: Callable[[Path], str]
) -> Settings:
    url = copy_sqlite(tmp_path / "sluice.db")
    return load_settings(redis_url=redis_server.url, database_url=url)


@pytest.fixture
def runner(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackRunner]:
    # SQLite's driver leaves a thread, which logs an error, if the loop ends during a statement.
    monkeypatch.setattr(Observer, "update", AsyncMock())
    with running(settings, Track.LEDGER) as runner:
        yield runner


def _job(
    run: Callable[[JobServices], Awaitable[Any]], *, limit_seconds: float = PATIENCE_SECONDS
) -> Task:
    return Task("test", run, 1.0, limit_seconds=limit_seconds)


def test_running_job_is_not_started_again(runner: TrackRunner) -> None:
    runs = []
    may_end = threading.Event()

    async def slow(_services: JobServices) -> None:
        runs.append(1)
        await asyncio.to_thread(may_end.wait, PATIENCE_SECONDS)

    for _ in range(3):
        runner.start(_job(slow))
    may_end.set()
    runner.run(_job(slow))
    assert len(runs) == 1
    runner.run(_job(slow))
    assert len(runs) == 2


@pytest.mark.filterwarnings("ignore::celery.exceptions.SecurityWarning")
def test_long_job_delays_no_other_job_and_a_stuck_one_no_job_of_the_ledger(
    runner: TrackRunner, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, may_end = queue.Queue[str](), threading.Event()

    def replaced(job: Task) -> Task:
        async def work(_services: JobServices) -> None:
            ends.put(job.name)
            if job.track is Track.LONG:
                await asyncio.Event().wait()

        return job._replace(run=work)

    async def block(_services: JobServices) -> None:
        ends.put("stuck")
        may_end.wait()

    jobs = [*map(replaced, TASKS), _job(block)._replace(name="stuck")]
    monkeypatch.setattr(app_module, "TASKS", jobs)
    monkeypatch.setattr(runner_module, "GRACE_SECONDS", 0.0)
    app = create_app(settings)

    def all_begin(some: Sequence[Task]) -> None:
        for job in some:
            app.send_task(START, [job.name], queue=job.track, expires=PATIENCE_SECONDS)
        assert {ends.get(timeout=PATIENCE_SECONDS) for _ in some} == {job.name for job in some}

    with running(settings, Track.LONG) as long:
        tracks, ready = {Track.LEDGER: runner, Track.LONG: long}, threading.Event()
        intake = Intake(app, tracks)
        worker = threading.Thread(target=run_worker, args=(app, tracks, intake, ready.set))
        worker.start()
        try:
            all_begin([job for job in jobs if job.name != "stuck"])
            all_begin(jobs[-1:])
            all_begin([job for job in jobs if job.track is Track.LEDGER])
            assert ready.is_set()
            assert runner.is_responsive()
            monkeypatch.setattr(runner_module, "RESPONSE_SECONDS", 0.1)
            assert not long.is_responsive()
        finally:
            may_end.set()
            monkeypatch.setattr(state, "should_stop", 0)
            worker.join(PATIENCE_SECONDS)
            stop_all(tracks.values())


@dataclass(frozen=True)
class Broker:
    """A Redis as the broker of a worker in a thread."""

    server: RedisServer
    app: Celery
    intake: Intake
    began: list[float]
    """One entry for each run that has begun."""

    def send(self) -> None:
        """Queue a run, as the scheduler does."""
        with suppress(OperationalError):
            self.app.send_task(START, ["test"], queue=Track.LEDGER, expires=PATIENCE_SECONDS)

    def await_run(self) -> None:
        """Queue runs until one begins."""
        before = len(self.began)

        def has_begun() -> bool:
            self.send()
            time.sleep(0.1)
            return len(self.began) > before

        wait_until(has_begun, what="a run")


@pytest.fixture
def broker(runner: TrackRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    began: list[float] = []

    async def work(_services: JobServices) -> None:
        began.append(time.monotonic())

    monkeypatch.setattr(app_module, "TASKS", [_job(work)._replace(track=Track.LEDGER)])
    with running_redis() as server:
        app = create_app(load_settings(redis_url=server.url))
        app.conf.worker_concurrency = 1  # As on one core: one unfinished run is too many.
        intake = Intake(app, [Track.LEDGER])
        arguments = app, {Track.LEDGER: runner}, intake, lambda: None
        worker = threading.Thread(target=run_worker, args=arguments)
        worker.start()
        try:
            yield Broker(server, app, intake, began)
        finally:
            monkeypatch.setattr(state, "should_stop", 0)
            worker.join(PATIENCE_SECONDS)
            assert not worker.is_alive()


@pytest.mark.filterwarnings("ignore::celery.exceptions.SecurityWarning")
def test_broker_that_dies_when_it_has_handed_out_a_run_stops_no_later_run(broker: Broker) -> None:
    """Celery confirms a run after it has received it, and only logs that it could not."""
    dead = threading.Event()

    def die(**_details: object) -> None:
        if not dead.is_set():
            broker.server.kill()
            dead.set()

    broker.await_run()
    task_received.connect(die)
    broker.send()
    assert dead.wait(PATIENCE_SECONDS)
    time.sleep(2.0)
    broker.server.start()
    broker.await_run()


@pytest.mark.filterwarnings("ignore::celery.exceptions.SecurityWarning")
def test_consumer_that_takes_no_runs_connects_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.await_run()
    stuck: list[QoS] = []

    def can_consume(channel: QoS) -> bool:
        """Return what a channel does that counts a run as unfinished forever."""
        stuck[:] = stuck or [channel]
        return channel is not stuck[0]

    monkeypatch.setattr(QoS, "can_consume", can_consume)
    wait_until(lambda: bool(stuck), what="the channel")
    assert not broker.intake.is_stuck(0.0), "nothing waits"
    begun = len(broker.began)

    def is_stuck() -> bool:
        broker.send()
        return broker.intake.is_stuck(0.5)

    wait_until(is_stuck, what="the sign")
    assert len(broker.began) == begun
    monkeypatch.setattr(app_module, "RECONNECT_SECONDS", 0.5)
    broker.await_run()
    broker.server.stop()
    assert not broker.intake.is_stuck(0.0), "no broker tells whether runs wait"
    broker.server.start()
    broker.await_run()


@pytest.mark.parametrize(
    "error", [RedisConnectionError("x"), StoreUnavailableError("x"), OSError(), TimeoutError()]
)
def test_outage_of_a_store_is_reported_once(
    runner: TrackRunner, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    is_away = True

    async def fail(_services: JobServices) -> None:
        if is_away:
            raise error

    def reported() -> int:
        return caplog.text.count("job test failed and is retried")

    for _ in range(3):
        runner.run(_job(fail))
    assert reported() == 1
    is_away = False
    runner.run(_job(fail))
    is_away = True
    runner.run(_job(fail))
    assert reported() == 2


def test_bug_in_a_job_is_reported_and_the_job_runs_again(
    runner: TrackRunner, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_services: JobServices) -> None:
        raise ZeroDivisionError

    for _ in range(2):
        runner.run(_job(fail))
    assert caplog.text.count("job test failed") == 2


def test_job_that_takes_too_long_is_cancelled(runner: TrackRunner) -> None:
    ends = []

    async def hang(_services: JobServices) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append(1)

    runner.run(_job(hang, limit_seconds=0.1))
    assert ends == [1]


def test_stopping_process_cancels_the_running_job(
    runner: TrackRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_module, "GRACE_SECONDS", 0.1)

    async def hang(_services: JobServices) -> None:
        await asyncio.Event().wait()

    runner.start(_job(hang, limit_seconds=2 * PATIENCE_SECONDS))
    runner.stop().result()
    assert "job test was cancelled" in caplog.text


@every_database
async def test_every_job_runs_also_twice_concurrently(
    database_url: str, redis: Redis, redis_server: RedisServer
) -> None:
    database = Database(database_url)
    await TenantService(database, ChangeAnnouncer(redis)).create("Acme", tenant_id="acme")
    await database.aclose()
    settings = load_settings(redis_url=redis_server.url, database_url=database_url)
    async with aclosing(JobServices(settings)) as services:
        for task in TASKS:
            with case(task.name):
                await asyncio.gather(task.run(services), task.run(services))
                await task.run(services)

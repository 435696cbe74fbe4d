"""What causes each alert, in a deployment with a real gateway and worker.

A cause is a context manager: while it is open, the deployment is in the state that the alert is
about. It yields the samples of that state.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, TypeVar
from unittest.mock import Mock

import httpx
import msgspec
import pytest
import redis
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis
from sqlalchemy import delete, select, text, update
from sqlalchemy.exc import DBAPIError

from common import clock
from contract import keys
from contract.outcomes import FailureCode
from gateway.accounts.keys.service import KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.batches.store import BatchStore
from gateway.billing.exports.routes import ExportService
from gateway.billing.exports.store import ExportStore
from gateway.billing.ledger.drain import row_of
from gateway.billing.ledger.store import LedgerStore
from gateway.cli.jobs import serving_health
from gateway.jobs import telemetry
from gateway.jobs.app import BoundedScheduler, create_app
from gateway.jobs.deployment_gauges import Observer
from gateway.jobs.runner import TrackRunner, running
from gateway.jobs.schedule import DRAIN, TASKS, Track
from gateway.platform import store_telemetry
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import AdapterRow, BatchRow, ExportBatchRow, ExportBatchState
from gateway.platform.redis_client import connect, observe_servers
from gateway.platform.settings import load_settings
from gateway.process.heartbeat import Heartbeat
from gateway.records.adapters import AdapterState
from gateway.records.errors import StoreUnavailableError
from gateway.records.times import to_ms, utc_now
from gateway.records.usage_record import encode_usage
from tests.gateway.conftest import asking
from tests.support.batches import running_batch
from tests.support.fake_worker import FakeWorker
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import free_port, wait_until
from tests.support.redis_server import Encryption
from tests.support.stack import MODEL, Stack, metric, wait_for_metric
from tests.support.usage import usage_record

TENANT: Final = "acme"
OTHER: Final = "other"
SINK: Final = "billing"
ADAPTER: Final = "ghost"
SCRAPE_SECONDS: Final = 1.0
T = TypeVar("T")

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], tuple[bool, float]]
"""By name and labels of a series: whether it is a counter, and its value."""
Cause = Callable[["Place"], AbstractContextManager[Samples]]


class Case(NamedTuple):
    """A cause, the alerts that it fires beside its own, and words for the runbook's commands."""

    cause: Cause
    others: frozenset[str]
    words: Mapping[str, str]


CASES: Final[dict[str, Case]] = {}


def causes(
    alert: str, *others: str, **words: str
) -> Callable[[Callable[["Place"], Iterator[Samples]]], None]:
    """Decorate a generator function that causes an alert."""

    def add(function: Callable[["Place"], Iterator[Samples]]) -> None:
        @contextmanager
        def cause(place: Place) -> Iterator[Samples]:
            steps = function(place)
            try:
                yield next(steps)
            finally:
                assert [*steps] == []

        CASES[alert] = Case(cause, frozenset(others), words)

    return add


@dataclass
class Place:
    """A deployment. Background jobs run in this process, whose metrics are theirs."""

    stack: Stack
    encryption: Encryption
    runner: TrackRunner
    patch: pytest.MonkeyPatch
    words: dict[str, str]
    """What stands in the runbook's commands for a name of the deployment."""

    def run(self, work: Callable[[Database, Redis], Coroutine[Any, Any, T]]) -> T:
        """Run something with the stores."""

        async def do() -> T:
            database = Database(self.stack.database_url)
            client = connect(self.stack.redis.url, max_connections=4)
            try:
                return await work(database, client)
            finally:
                await client.aclose()
                await database.aclose()

        return asyncio.run(do())

    def observe(self) -> Samples:
        """Update the gauges that `sluice jobs` reads from the stores, and scrape everything."""
        self.run(lambda database, client: Observer(client, database).update())
        return self.scrape()

    def scrape(self) -> Samples:
        """Read the metrics of all processes, as Prometheus does."""
        targets = {"sluice-gateway": self.stack.operators, "sluice-worker": self.stack.worker_url()}
        samples = _parsed(generate_latest(REGISTRY).decode(), "sluice-jobs")
        for job, url in targets.items():
            is_up = False
            with suppress(httpx.HTTPError):
                page = httpx.get(f"{url}/metrics", timeout=SCRAPE_SECONDS)
                found = _parsed(page.text, job).items()
                # On a busy machine, the gateway's event loop is late.
                samples |= {each: value for each, value in found if "_loop_lag_" not in each[0]}
                is_up = True
            samples["up", (("instance", job), ("job", job))] = (False, float(is_up))
        return samples

    def heal(self) -> None:
        """Run the job without which an alert would fire, and remove what other tests have left."""
        # Tests of certificates may have run in this process.
        store_telemetry._CERTIFICATE_EXPIRY.clear()
        self.runner.run(DRAIN)

    def post(self, body: Mapping[str, Any], *, tenant: str = TENANT) -> int:
        """Send a completion and return the status."""
        headers = {"authorization": f"Bearer {self.stack.key(tenant)}"}
        url = f"{self.stack.url}/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=PATIENCE_SECONDS).status_code

    def serve(
        self,
        model: str,
        answer: Callable[[FakeWorker], Awaitable[None]],
        *,
        stream: bool = False,
    ) -> None:
        """Send a request to a model whose only worker answers so."""
        headers = {"authorization": f"Bearer {self.stack.key(TENANT)}"}

        async def do(_: Database, client: Redis) -> None:
            # Frames of one worker have increasing numbers.
            worker = FakeWorker(client, model, name=f"worker of {model}")
            await worker.announce()
            async with httpx.AsyncClient(
                base_url=self.stack.url, headers=headers, timeout=PATIENCE_SECONDS
            ) as http:
                while (await http.get(f"/v1/models/{model}")).status_code != httpx.codes.OK:
                    await asyncio.sleep(0.05)
                body = asking(model=model, stream=stream)
                request = asyncio.create_task(http.post("/v1/completions", json=body))
                await answer(worker)
                await request
            await worker.queue.announce(worker.card(), ttl_ms=1)

        self.run(do)

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Stop a process for the length of a block."""
        process = self.stack.processes[name]
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)


def _parsed(page: str, job: str) -> Samples:
    added = {"job": job, "instance": job} | ({"pool": "p"} if job == "sluice-worker" else {})
    return {
        (each.name, tuple(sorted((each.labels | added).items()))): (
            family.type in ("counter", "histogram"),
            each.value,
        )
        for family in text_string_to_metric_families(page)
        for each in family.samples
    }


# --- processes ---------------------------------------------------------------------------------


@causes("SluiceGatewayDown", "SluiceProcessDown")
def _gateway_down(place: Place) -> Iterator[Samples]:
    with place.paused("gateway"):
        samples = place.scrape()
    # The runbook asks it from outside.
    place.words["https://YOUR-ADDRESS"] = place.stack.url
    yield samples


@causes("SluiceProcessDown")
def _process_down(place: Place) -> Iterator[Samples]:
    with place.paused("worker"):
        samples = place.scrape()
    yield samples


@causes("SluiceEventLoopHeld")
def _held(place: Place) -> Iterator[Samples]:
    async def hold() -> None:
        heartbeat = Heartbeat("", Mock(), Mock(), on_failure=Mock())
        for _ in range(3):
            check = asyncio.create_task(asyncio.to_thread(asyncio.run, heartbeat.check_loop()))
            await asyncio.sleep(0)
            time.sleep(0.3)  # noqa: ASYNC251 - this is what the alert is about
            await check

    asyncio.run(hold())
    yield place.scrape()


@causes("SluiceJobsNotRunning")
def _not_running(place: Place) -> Iterator[Samples]:
    yield from _done_before(place, DRAIN.name, timedelta(minutes=20))


@causes("SluiceReconciliationOverdue")
def _overdue(place: Place) -> Iterator[Samples]:
    yield from _done_before(place, "reconcile", timedelta(hours=4))


def _done_before(place: Place, name: str, age: timedelta) -> Iterator[Samples]:
    """Run a job by a clock that is late."""
    task = next(each for each in TASKS if each.name == name)
    now_ms = clock.now_ms
    with place.patch.context() as patch:
        patch.setattr(clock, "now_ms", lambda: now_ms() - int(1000 * age.total_seconds()))
        place.runner.run(task)
    yield place.scrape()
    telemetry.LAST_SUCCESS.clear()


@causes("SluiceJobsStalled")
def _stalled(place: Place) -> Iterator[Samples]:
    port = free_port()
    settings = load_settings(redis_url=place.stack.redis.url, metrics_port=str(port))
    app = create_app(settings)
    scheduler = BoundedScheduler(app)
    with redis.Redis.from_url(settings.redis_url) as client:
        client.rpush(Track.LONG, *(["x"] * 150))
        scheduler.apply_async(
            next(
                each for each in scheduler.schedule.values() if each.options["queue"] == Track.LONG
            )
        )
        samples = place.scrape()
        place.words["127.0.0.1:9464"] = f"127.0.0.1:{port}"
        with serving_health(settings, lambda: False):
            yield samples
        client.delete(Track.LONG)
    telemetry.WAITING_RUNS.clear()
    scheduler.close()
    app.close()


@causes("SluiceJobsFailing", "SluiceSqlErrors")
def _failing(place: Place) -> Iterator[Samples]:
    settings = load_settings(
        redis_url=place.stack.redis.url,
        database_url=f"sqlite+aiosqlite:///{place.stack.directory / 'empty.db'}",
    )
    task = next(each for each in TASKS if each.name == "fold")
    with running(settings, Track.LONG) as runner:
        runner.run(task)
    yield place.scrape()


# --- stores ------------------------------------------------------------------------------------


@causes("SluiceRedisErrors")
def _redis_errors(place: Place) -> Iterator[Samples]:
    async def fail(_: Database, client: Redis) -> None:
        await client.set("text", "x")
        for _turn in range(50):
            with suppress(redis.ResponseError):
                await client.execute_command("LPUSH", "text", "x")
        await client.delete("text")

    place.run(fail)
    place.words["CA_FILE"] = str(place.encryption.file)
    yield place.scrape()


@causes("SluiceRedisNearFull")
def _near_full(place: Place) -> Iterator[Samples]:
    with redis.Redis.from_url(place.stack.redis.url) as client:
        memory: Any = client.info("memory")
        client.config_set("maxmemory", int(memory["used_memory"] * 1.1))
        place.run(lambda _, each: observe_servers(each, timeout_seconds=SCRAPE_SECONDS))
        samples = place.scrape()
        client.config_set("maxmemory", 0)
        yield samples
        client.config_set("maxmemory", 0)


@causes("SluiceSqlErrors")
def _sql_errors(place: Place) -> Iterator[Samples]:
    async def fail(database: Database, _: Redis) -> None:
        for _turn in range(20):
            with suppress(DBAPIError, StoreUnavailableError):
                async with database.reading() as transaction:
                    await transaction.execute(text("SELECT nothing"))

    place.run(fail)
    yield place.scrape()


@causes("SluiceCertificateExpiry")
def _expiring(place: Place) -> Iterator[Samples]:
    async def ping() -> None:
        client = connect(place.encryption.url, max_connections=1)
        await client.execute_command("PING")
        await client.aclose()

    asyncio.run(ping())
    place.words["HOST:PORT"] = f"127.0.0.1:{place.encryption.port}"
    yield place.scrape()
    store_telemetry._CERTIFICATE_EXPIRY.clear()


# --- money -------------------------------------------------------------------------------------


@causes("SluiceLedgerLag")
def _lag(place: Place) -> Iterator[Samples]:
    record = usage_record(1, ended_ms=to_ms(utc_now()))
    with redis.Redis.from_url(place.stack.redis.url) as client:
        stream = keys.usage(keys.bucket_of(record.tenant_id))
        client.delete(stream)
        old = to_ms(utc_now()) - 900_000
        client.xadd(stream, {"u": encode_usage(record)}, id=f"{old}-0")
        yield place.observe()
        assert client.xlen(stream) == 0, "the command that moves the usage has not moved it"


@causes("SluiceReservationLeak")
def _leak(place: Place) -> Iterator[Samples]:
    with redis.Redis.from_url(place.stack.redis.url) as client:
        client.zadd(keys.open_requests(0), {"lost": to_ms(utc_now()) - 900_000})
        yield place.observe()
        client.delete(keys.open_requests(0))


@causes("SluiceKeyExpiry")
def _key(place: Place) -> Iterator[Samples]:
    async def create(database: Database, client: Redis) -> str:
        service = KeyService(database, ChangeAnnouncer(client))
        expires_at = utc_now() + timedelta(hours=12)
        return (await service.create(TENANT, name="soon", expires_at=expires_at)).record.id

    place.words["key_0123456789abcdef"] = place.run(create)
    yield place.observe()


@causes("SluiceExportStalled")
def _export_stalled(place: Place) -> Iterator[Samples]:
    _export(place, utc_now() - timedelta(hours=3))
    yield place.observe()


@causes("SluiceExportRejected")
def _export_rejected(place: Place) -> Iterator[Samples]:
    _, discarded, retried = _export(place, utc_now(), "rejected", "uncertain", "uncertain")
    place.words["discard NAME BATCH"] = f"discard {SINK} {discarded}"
    place.words["retry NAME BATCH"] = f"retry {SINK} {retried}"
    yield place.observe()

    place.run(lambda database, _: ExportService(database).remove(SINK))


def _export(place: Place, ended: datetime, *states: str) -> list[int]:
    """Add a sink, a batch in each of these states, and a request that the sink lacks.

    Return the ids of the batches.
    """
    place.words["NAME"] = SINK

    async def add(database: Database, _: Redis) -> list[int]:
        async with database.writing() as transaction:
            store = ExportStore(transaction)
            sink = await store.register(SINK, "openmeter", utc_now())
            numbers = range(len(states) + 1)
            records = [
                usage_record(number, request_id=f"{states}-{number}", ended_ms=to_ms(ended))
                for number in numbers
            ]
            await LedgerStore(transaction).insert([row_of(each) for each in records])
            for state in states:
                await store.freeze_requests(sink, 1)
                pending = ExportBatchRow.state == ExportBatchState.PENDING
                await transaction.execute(
                    update(ExportBatchRow).where(pending).values(state=ExportBatchState(state))
                )
            return list(await transaction.scalars(select(ExportBatchRow.id)))

    return place.run(add)


# --- batches -----------------------------------------------------------------------------------


@causes("SluiceBatchLate")
def _late(place: Place) -> Iterator[Samples]:
    yield from _batch(place, completed=1, progressed_at=utc_now())


@causes("SluiceBatchStarved")
def _starved(place: Place) -> Iterator[Samples]:
    yield from _batch(place, completed=0, progressed_at=utc_now() - timedelta(hours=1))


def _batch(place: Place, **values: Any) -> Iterator[Samples]:
    began = utc_now() - timedelta(hours=2)
    batch = running_batch(
        TENANT,
        "batch_0",
        created_at=began,
        expires_at=began + timedelta(hours=3),
        in_progress_at=began,
        total=1000,
        **values,
    )

    async def add(database: Database, _: Redis) -> None:
        async with database.writing() as transaction:
            await BatchStore(transaction).add(batch)

    async def remove(database: Database, _: Redis) -> None:
        async with database.writing() as transaction:
            await transaction.execute(delete(BatchRow))

    place.run(add)
    place.words["BATCH"] = batch.id
    yield place.observe()
    place.run(remove)


# --- requests ----------------------------------------------------------------------------------


@causes("SluiceNoReadyWorker", "SluiceAvailabilityBudgetBurn")
def _no_worker(place: Place) -> Iterator[Samples]:
    async def refuse(worker: FakeWorker) -> None:
        await worker.conclude(await worker.claim_one(), " a")

    place.serve("gone", refuse)
    labels = {"instance": "sluice-gateway", "job": "sluice-gateway", "model": "gone"}
    workers = "sluice_queue_ready_workers", tuple(labels.items())
    # Before, a request would wait for the worker to return, and count as failed.
    wait_until(lambda: not place.scrape()[workers][1], what="the end of the worker's announcement")
    assert place.post(asking(model="gone")) == 503
    yield place.scrape()


@causes("SluiceAvailabilityBudgetBurn")
def _failures(place: Place) -> Iterator[Samples]:
    async def fail(worker: FakeWorker) -> None:
        await worker.fail(await worker.claim_one(), FailureCode.ENGINE_ERROR, "planted")

    place.serve("broken", fail)
    yield place.scrape()


@causes("SluiceFirstTokenBudgetBurn")
def _late_first_token(place: Place) -> Iterator[Samples]:
    async def answer(worker: FakeWorker) -> None:
        claim = await worker.claim_one()
        await asyncio.sleep(2.6)
        await worker.conclude(claim, " a")

    place.serve("late", answer, stream=True)
    yield place.scrape()


@causes("SluiceInterTokenBudgetBurn")
def _slow_tokens(place: Place) -> Iterator[Samples]:
    async def answer(worker: FakeWorker) -> None:
        claim = await worker.claim_one()
        for word in (" a", " b"):
            await worker.say(claim, word)
            await asyncio.sleep(0.3)
        await worker.conclude(claim, " c")

    place.serve("slow", answer, stream=True)
    yield place.scrape()


@causes("SluiceQueueStalled")
def _queue_stalled(place: Place) -> Iterator[Samples]:
    yield from _waiting(place, "stalled", age_ms=0)


@causes("SluiceQueueSlow", "SluiceQueueStalled")
def _queue_slow(place: Place) -> Iterator[Samples]:
    yield from _waiting(place, "busy", age_ms=60_000)


def _waiting(place: Place, model: str, *, age_ms: int) -> Iterator[Samples]:
    """Yield the samples while a request waits that arrived so long ago."""
    found: list[Samples] = []

    async def hold(worker: FakeWorker) -> None:
        with redis.Redis.from_url(place.stack.redis.url) as client:
            arrivals = keys.arrivals(model)
            waiting: Any = None
            while not waiting:
                await asyncio.sleep(0.02)
                waiting = client.zrange(arrivals, 0, -1)
            for each in waiting:
                client.zincrby(arrivals, -age_ms, each)
        # The gateway reads its catalogue once a second.
        while not found or found[-1][_series(model)][1] == 0:
            await asyncio.sleep(0.2)
            found.append(await asyncio.to_thread(place.scrape))
        await worker.conclude(await worker.claim_one(), " a")

    place.serve(model, hold)
    yield found[-1]


def _series(model: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    labels = {"instance": "sluice-gateway", "job": "sluice-gateway", "model": model}
    return "sluice_queue_waiting_jobs", tuple(sorted(labels.items()))


# --- workers -----------------------------------------------------------------------------------


@causes("SluiceEngineCrashLoop")
def _crash(place: Place) -> Iterator[Samples]:
    url, name = place.stack.worker_url(), "sluice_worker_engine_restarts_total"
    before = metric(url, name)
    place.stack.processes["worker"].send_signal(signal.SIGUSR1)
    wait_for_metric(url, name, before + 1)
    yield place.scrape()
    # The runbook suspends the tenant.
    place.run(_activate)


async def _activate(database: Database, client: Redis) -> None:
    await TenantService(database, ChangeAnnouncer(client)).activate(TENANT)


@causes("SluiceWorkerInexact")
def _inexact(place: Place) -> Iterator[Samples]:
    url, name = place.stack.worker_url(), "sluice_worker_inexact"
    with redis.Redis.from_url(place.stack.redis.url) as client:
        wait_until(lambda: bool(list(client.scan_iter("*:canary:*"))), what="a reference")
        [reference] = client.scan_iter("*:canary:*")
        content: Any = client.get(reference)
        scores = msgspec.msgpack.decode(content)
        for tokens in scores.values():
            tokens[0][0][1] -= 5.0
        client.set(reference, msgspec.msgpack.encode(scores))
        wait_for_metric(url, name, 1)
        class_name = reference.decode().rpartition(":")[2]
        place.words |= {"MODEL": MODEL, "CLASS": class_name}
        yield place.scrape()
        wait_for_metric(url, name, 0)


@causes("SluiceAdapterLoadsFail", "SluiceAvailabilityBudgetBurn")
def _adapter(place: Place) -> Iterator[Samples]:
    row = AdapterRow(
        id="adapter_0",
        tenant_id=TENANT,
        name=ADAPTER,
        base_model=MODEL,
        source="",
        is_shared=False,
        state=AdapterState.READY,
        reason="",
        sha256="0" * 64,
        rank=8,
        target_modules=[],
        size=1,
        is_stored=True,
        created_at=utc_now(),
        claimed_until=utc_now(),
    )

    async def add(database: Database, client: Redis) -> None:
        async with database.writing() as transaction:
            transaction.add(row)
        await ChangeAnnouncer(client).adapters_changed()

    place.run(add)
    body = asking(model=f"{MODEL}:{ADAPTER}")
    wait_until(lambda: place.post(body) == 503, what="a failed load")
    # The gateway counts waiting jobs once a second.
    wait_for_metric(place.stack.operators, "sluice_queue_waiting_jobs", 0)
    yield place.scrape()


@causes("SluicePreemptionThrash")
def _thrash(place: Place) -> Iterator[Samples]:
    """A tenant that has the whole engine gives up its longer and longer sequences for another."""
    names = [f"sluice_worker_{each}_tokens_total" for each in ("preempted", "completion")]
    before = [metric(place.stack.worker_url(), name) for name in names]

    def grown() -> list[float]:
        now = [metric(place.stack.worker_url(), name) for name in names]
        return [value - since for value, since in zip(now, before, strict=True)]

    headers = {"authorization": f"Bearer {place.stack.key(TENANT)}"}
    body = asking(stream=True, max_tokens=1900, ignore_eos=True, n=2)
    url = f"{place.stack.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE_SECONDS):
        wait_until(lambda: grown()[1] > 600, what="long sequences")

        def press() -> bool:
            place.post(asking(max_tokens=1), tenant=OTHER)
            preempted, generated = grown()
            return preempted > 1.1 * generated

        wait_until(press, what="preemptions")
        yield place.scrape()

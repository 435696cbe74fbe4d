"""One master of a cluster is stopped: work that needs only the others continues."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import select

from common.redis_cluster import slot_map_of, slot_of_key
from common.tasks import end_task
from contract import keys, messages
from contract.messages import JobStarted
from contract.queue import JobQueue, ModelStatus
from contract.scripts.cluster import ClusterConnection, ServerProcesses, ask_every_server
from contract.scripts.cluster import shared_connection as shared
from contract.scripts.executor import SharedConnection
from gateway.billing.ledger.drain import Drain
from gateway.billing.ledger.sweep import Sweep
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.completions.queue.generation import Generation
from gateway.completions.queue.presence import Presence, known_gateways
from gateway.completions.settlement import SettlementService
from gateway.completions.stored.owned import WRITE_SECONDS
from gateway.limits.replies import RequestEnd, ReservationRequest
from gateway.limits.reservations import MOST_AT_ONCE, Endings, Reservations
from gateway.limits.seeding import Seeder
from gateway.limits.store import QuotaStore
from gateway.models.catalogue import Catalogue, ServedModel
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import LedgerRow
from gateway.platform.redis_client import connect, shared_connection
from gateway.records.limits import Limits, LimitScope, SubjectLimits
from gateway.records.usage_record import Counts, UsageRecord, encode_usage
from tests.failures.proofs.client import ask
from tests.gateway.desk import Desk
from tests.gateway.jobs.test_sweep import _draft
from tests.gateway.limits.fake_ledger import FakeLedger
from tests.support.fake_worker import FakeWorker
from tests.support.redis_cluster import RedisClusterServers, running_cluster
from tests.support.stack import CHECKPOINT, MODEL, Stack, http_status, running_stack
from tests.support.usage import usage_record
from worker import redis_client as worker_client
from worker.queue.held import HeldDigests
from worker.queue.link import GatewayWatch
from worker.queue.replies import ReplyWriter
from worker.registration import Registration
from worker.settings import WorkerSettings

STALLED = 0
"""Number of the master that is stopped. It has the keys of no tag too."""
SOON_SECONDS = 2.0
"""Less than a worker waits for a server that does not respond."""
SPELLS = 3
"""How often latencies are measured: a machine under load may stop for a moment in one of them."""

pytestmark = pytest.mark.usefixtures("frozen_redis_is_left")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisClusterServers]:
    """Three masters, of which one is stopped together with its replica."""
    with running_cluster() as cluster:
        slots = {slot_of_key(name) for name in (keys.MODELS, keys.GATEWAYS, keys.tokenizer("x"))}
        cluster.move([*slots], to=cluster.masters[STALLED])
        cluster.replicas[STALLED].freeze()
        cluster.masters[STALLED].freeze()
        yield cluster


@dataclass
class Side:
    """Names whose keys are all on the stopped master, or all on others."""

    is_stalled: Callable[[str], bool]
    wanted: bool

    def name(self, key: Callable[[str], str], prefix: str = "") -> str:
        names = (f"{prefix}{number}" for number in count())
        return next(each for each in names if self.is_stalled(key(each)) is self.wanted)

    def model(self) -> str:
        return self.name(keys.leases, "a" if self.wanted else "b")

    def gateway(self) -> str:
        return self.name(keys.replies, "gw-a" if self.wanted else "gw-b")

    def tenant(self) -> str:
        return self.name(lambda tenant: keys.usage(keys.bucket_of(tenant)), "tenant-")


@pytest.fixture
async def redis(cluster: RedisClusterServers) -> AsyncIterator["Redis"]:
    async with connect(cluster.url, max_connections=64) as client:
        slots = slot_map_of(client)
        assert slots is not None
        await slots.ready()
        yield client


@pytest.fixture
async def executor(redis: "Redis") -> AsyncIterator[Any]:
    executor = shared_connection(redis)
    yield executor
    await executor.aclose()


@pytest.fixture
def sides(cluster: RedisClusterServers, redis: "Redis") -> tuple[Side, Side]:
    """What is on the stopped master, and what is not."""
    slots: Any = slot_map_of(redis)
    address = (cluster.host, cluster.port(cluster.masters[STALLED]))

    def is_stalled(key: str) -> bool:
        return bool(slots.owner(slot_of_key(key)) == address)

    return Side(is_stalled, wanted=True), Side(is_stalled, wanted=False)


async def admit(redis: "Redis", draft: UsageRecord, *, lease_ms: int) -> None:
    """Reserve for a request as a gateway that then dies."""
    tenant = draft.tenant_id
    request = ReservationRequest(
        request_id=draft.request_id,
        tenant_id=tenant,
        subjects=(SubjectLimits(LimitScope.TENANT, tenant, Limits()),),
        prompt_tokens=1,
        completion_tokens=1,
        cost_micros=0,
        is_prepaid=False,
        record=encode_usage(draft),
    )
    await QuotaStore(redis).reserve(request, lease_ms=lease_ms)


async def test_frames_of_other_streams_are_written_soon(
    cluster: RedisClusterServers, redis: "Redis", sides: tuple[Side, Side]
) -> None:
    stalled, healthy = (each.gateway() for each in sides)
    written: list[Any] = []
    async with worker_client.connect(cluster.url) as client:
        connection: Any = shared(client, partial(SharedConnection, timeout_seconds=5))
        assert isinstance(connection, ClusterConnection)
        writer = ReplyWriter(connection, "w1", 100, lambda ends, _: written.extend(ends))
        running = asyncio.create_task(writer.run())
        try:
            async with asyncio.timeout(SOON_SECONDS):
                for number in range(1, 21):
                    for name in (stalled, healthy):
                        started = JobStarted(number, 1, 3, 0, "class")
                        writer.outbox(name).start(started, is_streamed=True)
                    writer.flush()
                    while await redis.xlen(keys.replies(healthy)) < number:
                        await asyncio.sleep(0.005)
            assert len(writer.outbox(stalled).started) == 19, "one frame of a stream is in flight"
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await connection.aclose()


async def test_jobs_of_other_models_are_reclaimed(
    redis: "Redis", executor: Any, sides: tuple[Side, Side]
) -> None:
    catalogue = Catalogue(executor)
    dispatcher = Dispatcher(
        gateway=sides[1].gateway(),
        client=redis,
        catalogue=catalogue,
        max_waiting_jobs=10,
        max_waiting_jobs_of_tenant=10,
        queue_timeout_seconds=60.0,
        resume_after_seconds=0.0,
    )
    models = [each.model() for each in sides]
    workers = [FakeWorker(redis, model) for model in models]
    status = ModelStatus(ready_workers=1, waiting_jobs=0, leased_jobs=0)
    catalogue._models = {each.queue.model: ServedModel(each.card(), status) for each in workers}
    desk = Desk.__new__(Desk)
    desk.dispatcher = dispatcher
    await dispatcher.enqueue(
        models[1], [desk.job()], weight=1.0, generation=Generation(max_unread_bytes=1 << 20)
    )
    await workers[1].lose(await workers[1].claim_one())
    with suppress(RedisError):
        await dispatcher._lost_jobs.reclaim()
    try:
        async with asyncio.timeout(SOON_SECONDS):
            assert (await workers[1].claim_one()).attempt == 2
    finally:
        await dispatcher._replies.recoveries.aclose()


async def test_receipts_of_other_models_are_dropped(
    executor: Any, sides: tuple[Side, Side]
) -> None:
    unused: Any = None
    service = SettlementService(unused, unused, Catalogue(executor), unused)
    stalled, healthy = (each.model() for each in sides)
    for model in (stalled, healthy):
        service.drop_receipts(model, ["job"])
    with pytest.raises(RedisError):
        await service._drop_all()
    assert service._to_drop == {stalled: ["job"]}


async def test_leases_on_other_masters_are_renewed_and_lost_ones_restored(
    redis: "Redis", executor: Any, sides: tuple[Side, Side]
) -> None:
    store = QuotaStore(executor)
    reservations = Reservations(store, Seeder(store, FakeLedger()), "g1")
    stalled, healthy = (each.tenant() for each in sides)
    reservations._open["stalled"] = ReservationRequest.of(
        _draft(9, tenant_id=stalled), (), Counts()
    )
    for number in range(2):
        draft = _draft(number, tenant_id=healthy)
        await admit(redis, draft, lease_ms=10_000)
        reservations._open[draft.request_id] = ReservationRequest.of(draft, (), Counts())
    bucket = keys.bucket_of(healthy)
    open_reservations = keys.open_requests(bucket)
    await redis.delete(keys.request(bucket, draft.request_id))
    before: Any = await redis.zscore(open_reservations, _draft(0).request_id)
    unknown = await reservations.extend(store)
    after: Any = await redis.zscore(open_reservations, _draft(0).request_id)
    assert after > before
    assert unknown == [draft.request_id]


async def test_endings_on_other_masters_are_repeated(
    redis: "Redis", executor: Any, sides: tuple[Side, Side]
) -> None:
    endings = Endings(QuotaStore(executor))
    stalled, healthy = (each.tenant() for each in sides)
    for number in range(MOST_AT_ONCE):
        endings._add(RequestEnd(tenant_id=stalled, request_id=f"stalled-{number}"))
    endings._add(RequestEnd(tenant_id=healthy, request_id="healthy"))
    await endings._send_some()
    assert "healthy" not in endings
    assert len(endings) == MOST_AT_ONCE


async def test_usage_on_other_masters_is_drained(
    redis: "Redis", database: Database, sides: tuple[Side, Side]
) -> None:
    tenant = sides[1].tenant()
    stream = keys.usage(keys.bucket_of(tenant))
    await redis.xadd(stream, {"u": encode_usage(usage_record(1, tenant_id=tenant))})
    with pytest.raises(RedisError):
        await Drain(redis, database).run()
    assert not await redis.xlen(stream)
    async with database.reading() as transaction:
        assert list(await transaction.scalars(select(LedgerRow.tenant_id))) == [tenant]


async def test_requests_on_other_masters_are_swept(
    redis: "Redis", sides: tuple[Side, Side]
) -> None:
    stalled, healthy = sides
    tenant, model, gateway = healthy.tenant(), healthy.model(), healthy.gateway()
    drafts = [
        _draft(11, tenant_id=tenant, model=stalled.model(), gateway=gateway),
        _draft(12, tenant_id=tenant, model=model, gateway=stalled.gateway()),
        _draft(13, tenant_id=tenant, model=model, gateway=gateway),
    ]
    bucket = keys.bucket_of(tenant)
    await redis.delete(keys.open_requests(bucket))
    for draft in drafts:
        await admit(redis, draft, lease_ms=0)
    with pytest.raises(RedisError):
        await Sweep(redis).run()
    left: Any = await redis.zrange(keys.open_requests(bucket), 0, -1)
    assert [each.decode() for each in left] == [each.request_id for each in drafts[:2]]


async def test_the_heartbeat_of_a_gateway_needs_only_its_own_master(
    redis: "Redis", sides: tuple[Side, Side]
) -> None:
    gateway = sides[1].gateway()
    presence = Presence(gateway, redis, resume_after_seconds=0.0)
    async with asyncio.timeout(SOON_SECONDS):
        await presence.announce(redis)
    assert await redis.exists(keys.gateway_alive(gateway))


async def test_models_on_other_masters_have_their_present_status(
    redis: "Redis", executor: Any, sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "MODELS", sides[1].name(str))
    stalled, healthy = (FakeWorker(redis, each.model()) for each in sides)
    for worker in (stalled, healthy):
        card = messages.encode(worker.card())
        await redis.hset(keys.MODELS, worker.queue.model, card)
    status = ModelStatus(ready_workers=1, waiting_jobs=0, leased_jobs=0)
    catalogue = Catalogue(executor)
    catalogue._models = {stalled.queue.model: ServedModel(stalled.card(), status)}
    await healthy.queue.announce(healthy.card(), ttl_ms=60_000)
    await catalogue.refresh()
    assert [each.is_ready for each in catalogue.models] == [True, True]


async def test_a_worker_stays_announced_while_its_model_is_not(
    redis: "Redis", sides: tuple[Side, Side]
) -> None:
    queue = JobQueue(redis, sides[1].model())
    settings = WorkerSettings(
        model_path=str(CHECKPOINT), worker_id="w1", engine="scripted", context_window=1_000
    )
    registration = Registration(redis, queue, HeldDigests(queue, "w1"), settings)
    registration._announced = registration._card.state
    async with asyncio.timeout(SOON_SECONDS):
        with pytest.raises(TimeoutError):
            await registration.announce()
    assert await redis.exists(keys.worker_card(queue.model, "w1"))


async def test_a_worker_sees_which_gateways_of_other_masters_are_dead(
    cluster: RedisClusterServers, sides: tuple[Side, Side]
) -> None:
    stalled, healthy = (each.gateway() for each in sides)
    async with worker_client.connect(cluster.url, timeout_seconds=1.0) as client:
        watch = GatewayWatch(client)
        await client.delete(keys.gateway_alive(healthy))
        async with asyncio.timeout(0.9):
            assert await watch.is_alive(stalled)
        await watch.check([stalled, healthy])
        assert watch.missing_for(0) == {healthy}
        assert await watch.is_alive(stalled)


async def test_another_process_is_noticed_on_other_masters(executor: Any) -> None:
    processes = ServerProcesses()
    infos = await ask_every_server(executor, "INFO", "server")
    living = {each["run_id"] for each in infos if each is not None}
    assert len(living) == 2
    processes._known = {*living, "stalled"}
    assert not await processes.have_changed(executor)
    processes._known = {living.pop(), "stalled"}
    assert await processes.have_changed(executor)
    assert not await processes.have_changed(executor)


@pytest.fixture
def served() -> Iterator[tuple[RedisClusterServers, Stack, list[str]]]:
    """A cluster, and a deployment on it with a gateway for each master; the gateways' names."""
    cluster, names = RedisClusterServers(), list[str]()
    with running_stack(redis=cluster) as stack:
        stack.program = "tests.support.short_leases"
        for number in range(3):
            stack.start_gateway(f"gateway-{number}")
            names += asyncio.run(_gateways(cluster.url)) - set(names)
        stack.start_worker(SLUICE_ENGINE="scripted", SLUICE_SCRIPTED_STEP_SECONDS="0.01")
        stack.key()
        yield cluster, stack, names


async def _gateways(url: str) -> set[str]:
    async with connect(url, max_connections=2) as redis:
        return set(await known_gateways(redis))


async def latencies(
    stack: Stack, *, seconds: float, counts: Callable[[str], bool] = lambda _: True
) -> list[float]:
    """Return the seconds that each streamed request to the first two gateways takes.

    `counts` says by its id whether a request is wanted.
    """
    found: list[float] = []
    end = time.monotonic() + seconds

    async def send(url: str) -> None:
        while time.monotonic() < end:
            answer = await ask(
                url, stack.key(), prompt="one", max_tokens=20, stream=True, ignore_eos=True
            )
            assert (answer.status, answer.is_complete) == (200, True), answer.body
            assert answer.request_id is not None
            if counts(answer.request_id):
                found.append(answer.ended_at - answer.sent_at)

    await asyncio.gather(*(send(url) for url in 2 * stack.gateways[:2]))
    return sorted(found)


def _p95(seconds: Sequence[float]) -> float:
    """Of some hundred requests: the longest few show how often the machine stops."""
    return seconds[int(0.95 * len(seconds))]


@pytest.mark.slow
async def test_requests_that_need_only_other_masters_are_as_fast_as_before(
    served: tuple[RedisClusterServers, Stack, list[str]],
) -> None:
    cluster, stack, names = served
    async with connect(cluster.url, max_connections=4) as redis:
        await redis.ping()
        slots: Any = slot_map_of(redis)
        ports = [slots.owner(slot_of_key(keys.replies(name)))[1] for name in names]
        stalled_port = ports[2]
    assert len(set(ports)) == 3
    healthy, _, stalled = (
        next(number for number, each in enumerate(cluster.masters) if each.port == port)
        for port in ports
    )
    tenant = keys.bucket_of("acme")
    for number, moved in (
        (healthy, [keys.leases(MODEL), keys.usage(tenant)]),
        (stalled, [keys.MODELS, keys.GATEWAYS]),
    ):
        found = [slot_of_key(each) for each in moved]
        await asyncio.to_thread(cluster.move, found, to=cluster.masters[number])
    # The worker has frames for the gateway whose master is stopped.
    others = [
        asyncio.create_task(
            ask(stack.gateways[2], stack.key(), prompt="two", max_tokens=1_900, ignore_eos=True)
        )
        for _ in range(2)
    ]
    await latencies(stack, seconds=2)
    before = await latencies(stack, seconds=10)
    cluster.replicas[stalled].freeze()
    cluster.masters[stalled].freeze()
    first = await latencies(stack, seconds=3)

    def has_journal_elsewhere(request_id: str) -> bool:
        """Leave out requests that wait for a write of their journal to the stopped master."""
        return bool(slots.owner(slot_of_key(keys.journal(request_id)))[1] != stalled_port)

    # On a busy machine, some of them wait once for WRITE_SECONDS, too.
    bound, after = 1.5 * _p95(before) + WRITE_SECONDS, [math.inf]
    for _ in range(SPELLS):
        if _p95(after) >= bound:
            after = await latencies(stack, seconds=12, counts=has_journal_elsewhere)
    ready = await asyncio.to_thread(http_status, f"{stack.url}/readyz")
    cluster.masters[stalled].thaw()
    await end_task(*others)
    for name, each in (("before", before), ("first 3 s", first), ("after", after)):
        print(  # noqa: T201
            f"{name}: {len(each)} requests, p50 {1e3 * each[len(each) // 2]:.0f} ms, "
            f"p95 {1e3 * _p95(each):.0f} ms, longest {1e3 * each[-1]:.0f} ms"
        )
    assert ready == 200
    assert _p95(after) < bound

"""Seats: histories of the scripts and of workers that make room, against the bounds of the queue.

Everything is real but time, the doorbells' waits, and the engine, which has no model.
"""

import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from typing_extensions import override

from common.clock import now_ms
from contract import keys
from contract.affinity import DIGEST_BYTES, prefix_affinity
from contract.messages import AdapterRef, GenerationJob, Resumption, SequenceProgress
from contract.outcomes import FinishReason
from contract.prompts import packed
from contract.queue import (
    COMPLETION_COST,
    PROMPT_COST,
    AdapterRoom,
    JobQueue,
    Rights,
    Room,
)
from contract.tier import ServiceTier
from tests.contract.test_fairness import announce
from tests.contract.test_queue import LEASE_MS, MODEL, enqueue, job
from tests.gateway.limits.building import TestClock
from tests.worker.conftest import MODEL_FOLDER
from worker.engine.base import AdapterLimits, EngineAdapter, EngineRequest, EngineStep
from worker.engine.scripted import Script, ScriptedEngine
from worker.execution import claims, preemption, running_job, sequence
from worker.execution.runner import Runner
from worker.execution.running_job import RunningJob
from worker.execution.sequence import LAST_TOKENS
from worker.execution.sequence import Sequence as EngineSequence
from worker.queue.doorbells import WAIT_SECONDS, Bell, Doorbells
from worker.queue.link import Link

SEATS, STEP_MS, SHARE = 8, 20, 0.5
RATE = SHARE * SEATS
"""Sequences that a worker preempts in a second."""
PREFILL = 64
"""Prompt tokens of a job that an engine processes in a step."""
QUANTUM = 256


class SteppedEngine(ScriptedEngine):
    """Makes a step when the test asks for it, and processes prompts in some steps."""

    def __init__(self, seats: int) -> None:
        limits = AdapterLimits(slots=2, loaded=2, max_rank=8, modules={})
        script = Script(max_sequences=seats, context_window=10**6, adapters=limits)
        super().__init__(MODEL_FOLDER, script)
        self._prefill = dict[str, int]()

    @override
    async def submit(self, requests: Iterable[EngineRequest]) -> None:
        await super().submit([*requests])
        for each in requests:
            known = len(each.prompt_token_ids) + len(each.output_token_ids)
            self._prefill[each.id] = -(-known // PREFILL)

    @override
    async def step(self) -> EngineStep:
        self._admit()
        assert len(self._running) <= self._script.max_sequences
        outputs = []
        for id_, each in [*self._running.items()]:
            self._prefill[id_] -= 1
            if self._prefill[id_] < 0:
                outputs.append(self._advance(each))
                if outputs[-1].end is not None:
                    del self._running[id_]
        return EngineStep(outputs, self._stats())


def _now() -> float:
    """Return the time of the workers in seconds."""
    now: float = vars(claims)["time"].monotonic()
    return now


class TimedDoorbells(Doorbells):
    """Waits return at once, and resume in the test's time."""

    ends_at = 0.0
    has_rung = False
    bells: Iterable[Bell] = ()

    @override
    async def wait(self, bells: Iterable[Bell], event: Any = None, *, seconds: float = 0) -> bool:
        self.bells = bells
        self.ends_at = _now() + (seconds or WAIT_SECONDS)
        await self.listen()
        return self.has_rung

    async def listen(self) -> None:
        """Take the tokens of the awaited doorbells."""
        taken = [
            await self._connections[bell].execute_command("LPOP", key)
            for bell in self.bells
            for key in self._doorbells[bell]
        ]
        self.has_rung = self.has_rung or any(taken)


@dataclass
class Seat:
    """A worker whose loops the test runs."""

    name: str
    engine: SteppedEngine
    link: Link
    runner: Runner

    @property
    def jobs(self) -> dict[str, RunningJob]:
        return self.runner._jobs.by_id

    async def turn(self) -> None:
        """Claim if something wakes the worker, until nothing is left to do."""
        claimer, changed = self.runner._claimer, self.runner._jobs.room_changed
        doorbells: Any = claimer._doorbells
        await doorbells.listen()
        turns = 0
        while doorbells.has_rung or changed.is_set() or _now() >= doorbells.ends_at:
            claimer._has_rung = claimer._has_rung or doorbells.has_rung
            doorbells.has_rung, doorbells.ends_at = False, 0.0  # Unless it waits.
            await claimer.claim()
            turns += 1
            assert turns < 200, "the worker claims for ever"


@dataclass
class Pool:
    """The workers of a model, the gateway of their jobs, and what each tenant received."""

    redis: "Redis"
    queue: JobQueue
    clock: TestClock
    seats: list[Seat] = field(default_factory=list)
    sent: dict[int, GenerationJob] = field(default_factory=dict)
    """By handle."""
    received: dict[int, list[list[int]]] = field(default_factory=dict)
    ends: dict[tuple[int, int], FinishReason] = field(default_factory=dict)
    returned: "deque[tuple[int, int, int]]" = field(default_factory=deque)
    """Steps at which jobs are requeued, their handles, and their attempts."""
    arrived: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    """Steps from the arrival of jobs to their first claims."""
    places: dict[str, str] = field(default_factory=dict)
    """The worker that first claimed each job."""
    preempted: list[tuple[int, str, int]] = field(default_factory=list)
    """Milliseconds, workers and sequences."""
    left: dict[tuple[str, int], int] = field(default_factory=dict)
    """The tokens with which sequences were last preempted, by job and index."""
    finished: list[str] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    """Service units of tenants, as no worker or script counts them."""
    delays: Counter[str] = field(default_factory=Counter)
    """Steps after which the gateway of a tenant requeues its jobs."""
    now: int = 0
    handles: "count[int]" = field(default_factory=lambda: count(1))

    async def send(self, tenant: str, *, prompt: int = 10, tokens: int = 60, **more: Any) -> str:
        handle = next(self.handles)
        n = more.pop("n", 1)
        sent = job(
            f"{tenant}-{handle}",
            tenant,
            prompt_tokens=prompt,
            deadline_ms=now_ms() + 10**7,
            max_tokens=tokens,
            handle=handle,
            n=n,
            best_of=n,
            stream=True,
            **more,
        )
        self.sent[handle], self.received[handle] = sent, [[] for _ in range(n)]
        self.arrived[sent.id] = self.now
        await enqueue(self.queue, sent)
        return sent.id

    def running(self, tenant: str, seat: Seat | None = None) -> int:
        """Return the sequences of a tenant that are in the engines."""
        seats = self.seats if seat is None else [seat]
        jobs = [each for some in seats for each in some.jobs.values()]
        return sum(each.seats for each in jobs if each.job.tenant == tenant)

    async def waiting(self, tenant: str) -> int:
        return int(await self.redis.zcard(keys.queue(MODEL, tenant)))

    async def turn(self, seats: Iterable[Seat] | None = None) -> None:
        for seat in self.seats if seats is None else seats:
            await seat.turn()
            for job_id, each in seat.jobs.items():
                if job_id not in self.waits:
                    self.waits[job_id] = self.now - self.arrived[job_id]
                    self.places[job_id] = seat.name
                    self.served[each.job.tenant] += PROMPT_COST * len(each.job.prompt_token_ids)
            await self._deliver(seat)

    async def step(self) -> None:
        """Let every engine make a step, and then every worker claim."""
        self.now += 1
        await self.clock.advance(STEP_MS)
        for seat in self.seats:
            step, by_sequence = await seat.engine.step(), seat.runner._jobs.by_sequence
            for output in step.outputs:
                # Others have left, and the engine aborts them in its next step.
                if generation := by_sequence.get(output.sequence_id):
                    self.served[generation.job.tenant] += COMPLETION_COST
            seat.runner._step_loop._apply(step)
            await seat.runner._submitter.apply_ends()
            await self._deliver(seat)
            if self.now % 4 == 0:
                assert not await seat.link.leases.extend([e.report for e in seat.jobs.values()])
        while self.returned and self.returned[0][0] <= self.now:
            _, handle, attempt = self.returned.popleft()
            progress = [
                SequenceProgress(each, self.ends.get((handle, choice)))
                for choice, each in enumerate(self.received[handle])
            ]
            sent = self.sent[handle]
            if any(self.received[handle]):
                resumption = Resumption(progress, prompt_tokens=len(sent.prompt_token_ids))
                sent = msgspec.structs.replace(sent, resumption=resumption)
            await self.queue.requeue(sent, attempt, is_returned=True)
        await self.turn()

    async def _deliver(self, seat: Seat) -> None:
        taken = seat.link.writer.outbox("gw-1").take(seat.name)
        for delta in taken.frame.deltas:
            self.received[delta.handle][delta.choice] += delta.token_ids
            if delta.finish_reason is not None:
                self.ends[delta.handle, delta.choice] = delta.finish_reason
        assert not taken.frame.failed
        for finished in taken.frame.finished:
            self.finished.append(self.sent[finished.handle].id)
        for each in taken.frame.returned:
            at = self.now + self.delays[self.sent[each.handle].tenant]
            self.returned.append((at, each.handle, each.attempt))
        seat.link.leases.written(taken.to_end, taken.to_release)
        if seat.link.leases._has_work.is_set():
            await seat.link.leases.settle()


@pytest.fixture
async def pool(
    request: pytest.FixtureRequest,
    any_redis: "Redis",
    clock: TestClock,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Pool]:
    """Two workers without jobs, whose engines have `SEATS` sequences if no parameter says more."""
    seats = getattr(request, "param", SEATS)
    pool = Pool(any_redis, JobQueue(any_redis, MODEL), clock)
    time = SimpleNamespace(monotonic=lambda: clock.now_ms / 1000)
    for module in (claims, running_job, preemption, sequence):
        monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(claims, "Doorbells", TimedDoorbells)
    preempt = preemption.Preemption._preempt

    def note(
        self: preemption.Preemption, job: RunningJob, leaving: list[EngineSequence], source: str
    ) -> None:
        for each in leaving:
            # It has generated for as many steps as what it had when it was preempted took again.
            if (before := pool.left.get((job.job.id, each.index))) is not None:
                assert each.tokens - before >= -(-(job.prompt_tokens + before) // PREFILL)
            pool.left[job.job.id, each.index] = each.tokens
        [name] = [e.name for e in pool.seats if e.runner._claimer._preemption is self]
        pool.preempted.append((clock.now_ms, name, len(leaving)))
        preempt(self, job, leaving, source)

    monkeypatch.setattr(preemption.Preemption, "_preempt", note)
    await any_redis.set(keys.gateway_alive("gw-1"), 1)
    async with AsyncExitStack() as stack:
        for name in ("w1", "w2"):
            pool.seats.append(await stack.enter_async_context(_seat(any_redis, name, seats)))
            await announce(pool.queue, name)
        yield pool


@asynccontextmanager
async def _seat(redis: "Redis", name: str, seats: int) -> AsyncIterator[Seat]:
    engine = SteppedEngine(seats)
    await engine.start()
    link = Link(redis, MODEL, worker=name, lease_ms=LEASE_MS, most_pending_deltas=10**6)
    runner = Runner(
        link,
        engine,
        gather_seconds=0,
        stall_seconds=0,
        preempted_share=SHARE,
        affinity_seconds=1,
    )
    yield Seat(name, engine, link, runner)
    await runner._claimer.aclose()
    runner._parser_thread.close()
    executor: Any = link.queue._executor
    await executor.aclose()


async def test_tenants_that_have_a_worker_each_do_not_preempt_each_other(pool: Pool) -> None:
    first, second = pool.seats
    for tenant, seat in (("a", first), ("b", second)):
        for _ in range(SEATS):
            await pool.send(tenant, tokens=500)
        await pool.turn([seat])
    for tenant in "ab":
        for _ in range(4):
            await pool.send(tenant, tokens=500)
    for _ in range(60):
        await pool.step()
    assert pool.running("a", first) == pool.running("b", second) == SEATS
    assert not pool.preempted
    # A third tenant gets a third of both.
    for _ in range(9):
        await pool.send("c", tokens=500)
    for _ in range(200):
        await pool.step()
    assert sorted(map(pool.running, "abc")) == [5, 5, 6]


async def test_tenant_below_its_share_of_the_model_gets_room_where_it_is_not_below_that_of_a_worker(
    pool: Pool,
) -> None:
    uses = ({"a": 3, "c": 2}, {"a": 3, "c": 2})
    for seat, use in zip(pool.seats, uses, strict=True):
        for tenant in [*"aaa", *"cc", *(f"{seat.name}-{n}" for n in range(3))]:
            await pool.send(tenant, tokens=500)
        await pool.turn([seat])
        assert {tenant: pool.running(tenant, seat) for tenant in use} == use
    await pool.send("c", tokens=500)
    for _ in range(60):
        await pool.step()
    assert (pool.running("a"), pool.running("c")) == (5, 5)


@pytest.mark.parametrize(
    ("youngest", "holder"), [(0, None), (1, None), (0, 1)], ids=["first", "second", "prefix"]
)
async def test_worker_that_makes_room_has_the_youngest_work_or_the_prefix(
    pool: Pool, youngest: int, holder: int | None
) -> None:
    affinity = prefix_affinity("salt", packed(range(400)), 16)
    if holder is not None:
        digest = affinity[:DIGEST_BYTES]
        await pool.queue.hold(pool.seats[holder].name, added=[digest], ttl_ms=LEASE_MS)
    for seat in (pool.seats[1 - youngest], pool.seats[youngest]):
        for _ in range(SEATS):
            await pool.send("a", tokens=500)
        await pool.turn([seat])
        for _ in range(40):
            await pool.step()
    job_id = await pool.send("b", prompt=400, affinity=affinity)
    await pool.step()
    chosen = pool.seats[youngest if holder is None else holder].name
    assert (pool.places[job_id], pool.waits[job_id]) == (chosen, 1)
    assert [name for _, name, _ in pool.preempted] == [chosen]


async def test_room_is_left_to_its_tenant_until_there_is_enough(pool: Pool) -> None:
    [seat, _] = pool.seats
    pool.seats = [seat]
    for _ in range(SEATS + 4):
        await pool.send("a", tokens=500)
    await pool.turn()
    # The other tenant was served more, so the first one is the next whose job fits.
    for _ in range(3):
        await pool.send("f", prompt=400, tokens=1)
    while len(pool.finished) < 3:
        await pool.step()
    pool.preempted.clear()
    seat.runner._claimer._preemption._allowance = 1.0
    await pool.send("f", n=2)
    for _ in range(30):
        await pool.step()
    assert pool.running("f") == 2
    assert sum(number for _, _, number in pool.preempted) <= 2


@pytest.mark.parametrize(
    ("pool", "tenants", "n"),
    [
        (SEATS, 1, 1),
        (SEATS, 1, SEATS + 3),
        (4 * SEATS, 10, 1),
        (4 * SEATS, 14, 4 * SEATS),
    ],
    ids=["streams", "group", "streams-of-many", "groups-of-many"],
    indirect=["pool"],
)
async def test_tenant_that_comes_again_and_again_finds_room_at_once(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, tenants: int, n: int
) -> None:
    monkeypatch.setattr("contract.queue.AFFINITY_QUANTUM", QUANTUM)
    [seat, _] = pool.seats
    pool.seats, made = [seat], seat.runner._claimer._preemption
    made._rate = made._allowance = made._most_allowance = 1000.0
    for number in range(tenants):
        for _ in range(1 if n > SEATS else 4 * SEATS // tenants + 3):
            await pool.send(f"a{number:02}", tokens=1000, n=n)
    await pool.turn()
    for _ in range(30):
        await pool.step()
    pool.preempted.clear()
    for _ in range(4 * SEATS):
        job_id = await pool.send("f", tokens=1)
        await pool.step()
        await pool.step()
        assert pool.waits[job_id] <= 2
        while job_id not in pool.finished:
            await pool.step()
    if tenants == 1:
        assert len(pool.preempted) == 4 * SEATS


@pytest.mark.parametrize("uses", [(2, 1.0), None], ids=["run", "only-wait"])
async def test_full_worker_finds_a_tenant_behind_many_others_and_reads_few_jobs(
    any_redis: "Redis", uses: tuple[int, float] | None
) -> None:
    """Nobody makes room for the others: they use their share, or all ask for too much."""
    queue, tenants = JobQueue(any_redis, MODEL), [f"a{number:03}" for number in range(150)]
    await announce(queue, "w1")
    for each in tenants:
        await enqueue(queue, job(each, each, n=4, best_of=4))
    await enqueue(queue, job("z", "z"))
    rights = Rights(2.0, {} if uses is None else dict.fromkeys(tenants, uses))
    await any_redis.config_resetstat()
    full = Room(tokens=10**6, sequences=0, most_sequences=8, empty=False, rights=rights)
    found = await queue.claim("w1", full, most_jobs=1, lease_ms=LEASE_MS)
    reads = (await any_redis.info("commandstats"))["cmdstat_hmget"]["calls"]
    assert len(found.next_jobs) == 8
    assert reads <= 40
    assert (found.next_jobs[0].tenant == "z") is (uses is not None)


async def test_large_group_leaves_room_to_the_other_jobs_of_its_tenant(pool: Pool) -> None:
    [seat, _] = pool.seats
    pool.seats = [seat]
    group = await pool.send("a", tokens=100, n=SEATS + 3)
    await pool.turn()
    assert seat.jobs[group].seats == SEATS
    first = await pool.send("a", tokens=5)
    await pool.step()
    assert pool.waits[first] <= 1
    while group not in pool.finished:
        while await pool.waiting("a") < 2:
            await pool.send("a", tokens=5)
        await pool.step()
        # What a claim counts of a job stays, and the rest of the engine is left to the others.
        assert group not in seat.jobs or seat.jobs[group].seats >= min(
            SEATS // 4, len(seat.jobs[group].open_sequences)
        )
        assert pool.now < 1000
    assert len(pool.finished) > 100
    check_preempted_share(pool)
    # Groups do not preempt each other.
    while await pool.waiting("a") or seat.jobs:
        await pool.step()
    pool.preempted.clear()
    seat.runner._claimer._preemption._allowance = RATE
    for _ in range(3):
        await pool.send("a", tokens=60, n=SEATS)
        for _ in range(10):
            await pool.step()
    assert seat.jobs
    assert not pool.preempted


async def test_batch_jobs_make_room_before_requests_do_and_within_one_bound(pool: Pool) -> None:
    [seat, _] = pool.seats
    pool.seats = [seat]
    for _ in range(SEATS):
        await pool.send("z", tokens=500, service_tier=ServiceTier.BATCH)
    await pool.turn()
    for _ in range(5):
        await pool.send("a", tokens=500)
        await pool.step()
    while pool.running("a") < 5:
        await pool.step()
    assert pool.running("z") == SEATS - 5
    # There is too little of the preempted share for all of it at once.
    seat.runner._claimer._preemption._allowance = 1.0
    await pool.send("f", n=2, tokens=500)
    while pool.running("f") < 2:
        await pool.step()
    assert (pool.running("a"), pool.running("z")) == (5, 1)
    for _ in range(3):
        await pool.send("f", tokens=5)
    for _ in range(40):
        await pool.step()
    check_preempted_share(pool)


ADVERSARY, HONEST, QUIET = "a", ("g", "h"), "f"
TOKENS = 30
Attack = Callable[[Pool], Any]


async def begins_again_and_again(pool: Pool) -> None:
    """Send a short request whenever none runs, so that each takes the room of another tenant."""
    if not (pool.running(ADVERSARY) or await pool.waiting(ADVERSARY)):
        await pool.send(ADVERSARY, tokens=3)


async def splits(pool: Pool) -> None:
    """Ask for all work with few requests of many sequences."""
    while await pool.waiting(ADVERSARY) < 2:
        await pool.send(ADVERSARY, tokens=TOKENS, n=SEATS + 3)


async def returns_late(pool: Pool) -> None:
    """Let the gateway requeue preempted jobs late, as if it were busy with slow readers."""
    pool.delays[ADVERSARY] = 40
    while await pool.waiting(ADVERSARY) < 3:
        await pool.send(ADVERSARY, tokens=TOKENS)


async def leaves_and_returns(pool: Pool) -> None:
    """Fill the queue, and cancel everything."""
    if pool.now % 30 == 0:
        for _ in range(2 * SEATS):
            await pool.send(ADVERSARY, tokens=TOKENS)
    elif pool.now % 30 == 15:
        for each in pool.sent.values():
            if each.tenant == ADVERSARY:
                await pool.queue.cancel(each.id, each.tenant)
        for seat in pool.seats:
            while await pool.redis.llen(keys.control(MODEL, seat.name)):
                await seat.runner._watcher.watch_cancellations()


async def holds_slots(pool: Pool) -> None:
    """Use the only slots for adapters, and wait for them with other adapters."""
    while await pool.waiting(ADVERSARY) < 3:
        adapter = AdapterRef(f"{next(pool.handles) % 3:064x}", 8, 1000)
        await pool.send(ADVERSARY, tokens=TOKENS, adapter=adapter)


def give_slots(seat: Seat, number: int = 1) -> None:
    """Let a worker load adapters, which have no files."""
    adapters: Any = seat.runner._adapters

    def room() -> AdapterRoom:
        used = {each.job.adapter.digest for each in seat.jobs.values() if each.job.adapter}
        return AdapterRoom([*used], number - len(used))

    async def load(generation: RunningJob) -> EngineAdapter:
        assert generation.job.adapter is not None
        adapter = EngineAdapter(1, generation.job.adapter.digest, "")
        seat.engine._adapters.add(adapter)
        return adapter

    adapters.room, adapters.load, adapters.is_loaded = room, load, lambda _: True


@pytest.mark.parametrize("others", [0, SEATS - 3], ids=["room", "full"])
async def test_tenant_with_most_slots_gives_up_the_one_that_repeats_least(
    pool: Pool, others: int
) -> None:
    [seat, _] = pool.seats
    pool.seats = [seat]
    give_slots(seat, 2)
    red, blue, green, gray = (AdapterRef(digit * 64, 8, 1000) for digit in "1234")
    for adapter in (red, blue, blue):
        await pool.send("a", tokens=500, adapter=adapter)
    for _ in range(others):
        await pool.send("b", tokens=500)
    await pool.turn()
    for _ in range(20):
        await pool.step()
    first = await pool.send("f", tokens=30, adapter=green)
    for _ in range(8):
        await pool.step()
    assert pool.waits[first] <= 4
    assert (pool.running("a"), pool.running("b"), pool.running("f")) == (2, others, 1)
    # Nobody has two slots now, so the next tenant waits for the end of a job.
    second = await pool.send("g", tokens=5, adapter=gray)
    while first not in pool.finished:
        assert second not in pool.waits
        await pool.step()
    while pool.running("a") < 3:
        await pool.step()
    assert second in pool.finished
    assert sum(number for _, _, number in pool.preempted) == 1


@pytest.mark.parametrize(
    "attack",
    [begins_again_and_again, splits, returns_late, leaves_and_returns, holds_slots],
    ids=lambda attack: attack.__name__,
)
async def test_no_tenant_keeps_others_from_their_shares(
    request: pytest.FixtureRequest,
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    attack: Attack,
) -> None:
    """Two tenants always wait, one comes now and then, and one attacks them.

    The bounds are those of docs/queue.md, with two workers of `SEATS` sequences.
    """
    monkeypatch.setattr("contract.queue.AFFINITY_QUANTUM", QUANTUM)
    rng, prompt, due = random.Random(7), 8 * PREFILL, 0
    for seat in pool.seats:
        give_slots(seat)
    sequences = 2 * SEATS + (2 * (SEATS + 3) if attack is splits else 0)
    unreported = COMPLETION_COST * 4 * 2 * SEATS
    service = max(PROMPT_COST * prompt, COMPLETION_COST * sequences * TOKENS)
    most_service = 2 * (service + QUANTUM) + 4 * unreported
    # Until a worker looks, its victims have made up for their preemptions or end, and it may
    # preempt: for each tenant before it.
    looks = (claims.FRESH_SECONDS + claims.CHECK_SECONDS) * 1000 / STEP_MS
    most_wait = looks + 2 * (prompt + TOKENS) / PREFILL + LAST_TOKENS
    most_wait += (len(HONEST) + 2) * 1000 / RATE / STEP_MS
    quiet = list[str]()
    for _ in range(900 if request.config.getoption("--long") else 300):
        for tenant in HONEST:
            while await pool.waiting(tenant) < 3:
                await pool.send(tenant, prompt=prompt, tokens=TOKENS)
        await attack(pool)
        if pool.now >= due and not (pool.running(QUIET) or await pool.waiting(QUIET)):
            quiet.append(await pool.send(QUIET, tokens=5))
            due = pool.now + rng.randint(5, 25)
        await pool.step()
        first, second = (pool.served[tenant] for tenant in HONEST)
        assert abs(first - second) <= most_service
        assert pool.served[ADVERSARY] - min(first, second) <= most_service
    waits = [pool.waits.get(each, pool.now - pool.arrived[each]) for each in quiet]
    assert max(waits) <= most_wait
    assert sorted(waits)[len(waits) // 2] <= 2
    check_preempted_share(pool)
    # Nobody loses work for good, and all tokens arrive once.
    ended = Counter(job_id[0] for job_id in pool.finished)
    assert min(ended[tenant] for tenant in HONEST) > 10
    assert pool.served[ADVERSARY] > 0
    for handle, sent in pool.sent.items():
        if sent.id in pool.finished:
            assert [len(each) for each in pool.received[handle]] == [sent.max_tokens] * sent.n


def check_preempted_share(pool: Pool) -> None:
    """Check that no worker preempts more in any time than its share, and one burst."""
    for seat in pool.seats:
        events = [(at, number) for at, name, number in pool.preempted if name == seat.name]
        for start, (since, _) in enumerate(events):
            total = 0
            for at, number in events[start:]:
                total += number
                assert total - number < RATE * ((at - since) / 1000 + 1)

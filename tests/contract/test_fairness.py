"""The scripts equal a plain model of Virtual Token Counter with affinity on random histories."""

import math
import random
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import pytest
from redis.asyncio import Redis

from contract import keys
from contract.affinity import DIGEST_BYTES, boundaries, prefix_affinity, session_affinity
from contract.messages import AdapterRef, GenerationJob, WorkerCard, WorkerState
from contract.prompts import packed
from contract.queue import (
    COMPLETION_COST,
    PROMPT_COST,
    AdapterRoom,
    Affinity,
    JobQueue,
    LeaseReport,
    RequeueResult,
    Room,
)
from contract.tier import TIER_BOOSTS, TIER_RANKS, Lane, ServiceTier, lane_of
from tests.contract.test_queue import LEASE_MS, MODEL, PLENTY, claim_ids, enqueue, job, text
from tests.gateway.limits.building import TestClock

TENANTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0, "e": 4.0}
"""Weights: powers of two, so that counters are exact and ties are real."""
SHARES = {"c": 40, "e": 70}
"""Model shares in percent, of which each worker counts what it runs."""
ENGINE: dict[str, Any] = {"engine_tokens": 600, "engine_sequences": 4}
ACTIONS = {
    "enqueue": 5,
    "claim": 4,
    "charge": 3,
    "finish": 2,
    "cancel": 1,
    "requeue": 1,
    "return_": 1,
    "revive": 1,
    "promote": 1,
    "hold": 2,
    "announce": 1,
    "advance": 2,
}
WORKERS = ("w1", "w2", "w3")
CHATS = 4
ADAPTERS = ("red", "blue")
BLOCK = 16
PATIENCE_MS, KEEP_MS = 100, 600
CANDIDATES, MOST_KEPT = 16, 8
QUANTUM = 256
"""Less than a long prompt of a tenant with a low weight."""
FLEX, DEFAULT, PRIORITY = ServiceTier.FLEX, ServiceTier.DEFAULT, ServiceTier.PRIORITY
BATCH = ServiceTier.BATCH


Prefix = tuple[int, int]
"""A chat, and the length of a prefix of its prompts."""


class Entry(NamedTuple):
    """A job; entries of a tenant sort by their position in its queue."""

    rank: int
    is_fresh: bool
    """Whether it never started; started jobs come first."""
    number: int
    job_id: str
    tenant: str
    weight: float
    prompt: int
    need: int
    tier: ServiceTier
    chat: int
    adapter: str
    session: str

    @property
    def session_of_tenant(self) -> tuple[str, int, str] | None:
        """A session whose worker is known; chats of the same name do not share their beginning."""
        return (self.tenant, self.chat, self.session) if self.session and self.steps else None

    @property
    def steps(self) -> list[int]:
        """Lengths of the prefixes of which the job has digests, the longest first."""
        return [step for step in reversed(boundaries(BLOCK)) if step < self.prompt]

    @property
    def lane(self) -> Lane:
        return Lane.BATCH if self.rank == TIER_RANKS[BATCH] else Lane.REQUESTS

    def promoted(self, tier: ServiceTier) -> "Entry":
        weight = TENANTS[self.tenant] * TIER_BOOSTS[tier]
        return self._replace(rank=TIER_RANKS[tier], weight=weight)


@dataclass
class Running:
    """A claimed job."""

    entry: Entry
    attempt: int
    worker: str
    completion: int = 0
    is_cancelled: bool = False


@dataclass
class Index:
    """What workers hold, as a claim of one of them sees it, and what affinity did to jobs."""

    held: dict[str, set[Prefix]] = field(default_factory=lambda: {w: set() for w in WORKERS})
    holders: dict[Prefix, str] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    kept: dict[str, tuple[str, int]] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)
    """Waiting jobs that their worker gave back."""
    announced: set[str] = field(default_factory=set)
    """Workers that claim jobs. Those that hold something do, too."""
    sessions: dict[tuple[str, int, str], str] = field(default_factory=dict)
    """The worker that claimed the last job of each session."""
    servers: dict[str, str | None] = field(default_factory=dict)
    """That of each job, as the call first saw it."""
    worker: str = ""
    prefill_us: float = 0.0
    now_ms: int = 0
    keeps_jobs: bool = True
    is_used: bool = False
    holds_any: bool = False
    adapters: set[str] = field(default_factory=set)
    free_slots: int = -1
    waits_for_slot: bool = False
    slotless: set[str] = field(default_factory=set)
    """Tenants that wait for a slot. A call looks at them once, even if its room shrinks."""
    uses: dict[str, list[int]] = field(default_factory=dict)
    """As in `Room.uses`."""
    capped: set[str] = field(default_factory=set)
    """Tenants that wait for their shares. A call looks at them once, too."""
    leaves_only_kept: bool = False
    """Whether the call left only jobs that are kept, or wait for shares."""

    def begin(self, worker: str, prefill_us: float, now_ms: int) -> None:
        self.worker, self.prefill_us, self.now_ms = worker, prefill_us, now_ms
        self.keeps_jobs, self.is_used = True, bool(self.holders or self.sessions)
        self.holds_any = bool(self.held[worker] or self.sessions)
        self.servers.clear()

    def may_have_slot(self, adapter: str) -> bool:
        is_free = adapter in self.adapters or self.free_slots > 0
        return not adapter or (is_free and not self.waits_for_slot)

    def take_slot(self, adapter: str) -> None:
        if adapter and adapter not in self.adapters:
            self.free_slots -= 1
            self.adapters.add(adapter)

    def is_over(self, entry: Entry) -> bool:
        """Return whether a tenant would exceed its share of the engine with a job."""
        sequences, tokens = self.uses.get(entry.tenant, [0, 0])[:2]
        share = SHARES.get(entry.tenant, 100) / 100
        most, most_tokens = (max(int(share * each), 1) for each in reversed(ENGINE.values()))
        is_over = sequences + 1 > most or tokens + entry.need > most_tokens
        return entry.tenant in SHARES and sequences > 0 and is_over

    def cached(self, entry: Entry) -> int:
        if not self.is_used:
            return 0
        held = (step for step in entry.steps if (entry.chat, step) in self.held[self.worker])
        return next(held, 0)

    def look(self, entry: Entry) -> None:
        session = entry.session_of_tenant
        self.servers.setdefault(entry.job_id, self.sessions.get(session) if session else None)

    def score(self, entry: Entry) -> int:
        is_mine = self.servers[entry.job_id] == self.worker
        return entry.prompt if is_mine else self.cached(entry)

    def is_complete(self, entry: Entry) -> bool:
        if server := self.servers[entry.job_id]:
            return server == self.worker
        return entry.steps[:1] == [self.cached(entry)]

    def is_claiming(self, worker: str) -> bool:
        return worker in self.announced or bool(self.held[worker])

    def waits(self, entry: Entry) -> bool:
        return self.now_ms < self.kept.get(entry.job_id, ("", 0))[1]

    def is_kept(self, entry: Entry) -> bool:
        worker, _ = self.kept.get(entry.job_id, ("", 0))
        is_other = self.waits(entry) and worker != self.worker
        return self.keeps_jobs and is_other and self.is_claiming(worker)

    def is_due(self, entry: Entry) -> bool:
        since = self.now_ms - self.passed.get(entry.job_id, self.now_ms)
        return since >= PATIENCE_MS and not self.is_kept(entry)

    def keep(self, entry: Entry) -> bool:
        if not (self.keeps_jobs and self.prefill_us) or self.is_due(entry):
            return False
        if self.is_complete(entry) or entry.job_id in self.kept:
            return False
        passed_ms = self.now_ms - self.passed.get(entry.job_id, self.now_ms)
        cached = self.cached(entry)

        def wait_for(tokens: int, most: int) -> int:
            return min(int(2 * (tokens - cached) * self.prefill_us / 1000), most - passed_ms)

        best, longest = "", 0
        for step in entry.steps:
            holder = self.holders.get((entry.chat, step), self.worker)
            wait = wait_for(step, KEEP_MS)
            if holder == self.worker or wait < 1:
                continue
            if (entry.chat, step) in self.held[holder]:
                best, longest = holder, wait
                break
            del self.holders[entry.chat, step]
        server = self.servers[entry.job_id]
        if server and self.is_claiming(server):
            is_certain = (entry.chat, entry.steps[0]) in self.held[server]
            is_certain = is_certain and 2 * cached <= entry.prompt
            wait = wait_for(entry.prompt, KEEP_MS if is_certain else PATIENCE_MS)
            if wait > longest:
                best, longest = server, wait
        if longest < 1:
            return False
        self.kept[entry.job_id] = (best, self.now_ms + longest)
        self.passed.setdefault(entry.job_id, self.now_ms)
        return True

    def choose(self, queue: list[Entry], room: int) -> Entry | None:
        """Return a tenant's next job; None if all candidates are kept."""
        first, *_ = queue
        if not (self.is_used and first.steps):
            return first
        self.look(first)
        if self.is_due(first) or (self.is_complete(first) and not self.is_kept(first)):
            return first
        alike = [e for e in queue[:CANDIDATES] if e[:2] == first[:2]]
        while True:
            free, waiting = list[Entry](), 0
            for each in alike:
                self.look(each)
                waiting += self.waits(each)
                if not self.is_kept(each):
                    free.append(each)
                    # A worker that holds nothing takes the oldest job, without a look at others.
                    if self.is_due(each) or not self.holds_any:
                        break
            if not free:
                return None
            fitting = free[:1] + [each for each in free[1:] if each.need <= room]
            best = free[-1] if self.is_due(free[-1]) else max(fitting, key=self.score)
            may_wait = best.is_fresh or best.job_id in self.returned
            may_keep = may_wait and best.lane is Lane.REQUESTS and waiting < MOST_KEPT
            if may_keep and self.keep(best):
                continue
            for each in alike[: alike.index(best)]:
                self.passed.setdefault(each.job_id, self.now_ms)
            return best

    def allowance(self, queue: list[Entry]) -> float:
        """Return by how much others may exceed a tenant, of which all candidates are kept."""
        alike = [e for e in queue[:CANDIDATES] if e[:2] == queue[0][:2]]
        moved = (PROMPT_COST * (e.prompt - self.cached(e)) / e.weight for e in alike)
        return max(QUANTUM, *moved)

    def forget(self, job_id: str) -> None:
        self.passed.pop(job_id, None)
        self.kept.pop(job_id, None)
        self.returned.discard(job_id)


@dataclass
class LaneModel:
    """VTC as the paper has it, with places and weights by tier, in a few lines of Python."""

    counters: dict[str, float] = field(default_factory=dict)
    queues: dict[str, list[Entry]] = field(default_factory=dict)
    last: str | None = None

    def active(self) -> list[str]:
        return [t for t, q in self.queues.items() if q]

    def entries(self) -> list[Entry]:
        return [entry for queue in self.queues.values() for entry in queue]

    def fresh(self) -> dict[str, int]:
        return dict(Counter(f"{e.rank} {e.tenant}" for e in self.entries() if e.is_fresh))

    def put(self, entry: Entry) -> None:
        tenant = entry.tenant
        if not self.queues.get(tenant):
            if self.active():
                lift = min(self.counters[t] for t in self.active())
            else:
                lift = self.counters.get(self.last, 0.0) if self.last else 0.0
            self.counters[tenant] = max(self.counters.get(tenant, lift), lift)
        insort(self.queues.setdefault(tenant, []), entry)

    def remove(self, entry: Entry) -> None:
        self.queues[entry.tenant].remove(entry)
        if not self.queues[entry.tenant]:
            self.last = entry.tenant

    def next(self, index: Index, room: int) -> Entry | None:
        """Return the next job; None if none waits, or all that may go are kept."""
        ceiling = math.inf
        # Redis breaks ties between equal scores by name.
        for tenant in sorted(self.active(), key=lambda t: (self.counters[t], t)):
            if self.counters[tenant] > ceiling:
                index.keeps_jobs = False
                index.slotless.clear()
                index.capped.clear()
                return self.next(index, room)
            if tenant in index.slotless | index.capped:
                continue
            if entry := index.choose(self.queues[tenant], room):
                if index.may_have_slot(entry.adapter) and index.is_over(entry):
                    index.capped.add(tenant)
                    continue
                if index.may_have_slot(entry.adapter):
                    return entry
                # Others go first, but none with an adapter.
                index.waits_for_slot = True
                index.slotless.add(tenant)
                continue
            ceiling = min(ceiling, self.counters[tenant] + index.allowance(self.queues[tenant]))
        return None


@dataclass
class Model:
    """Both lanes, and the jobs that have left them."""

    lanes: dict[Lane, LaneModel] = field(default_factory=lambda: {e: LaneModel() for e in Lane})
    running: dict[str, Running] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    charged: dict[str, int] = field(default_factory=dict)
    ended: dict[str, Running] = field(default_factory=dict)
    uncached: dict[str, int] = field(default_factory=dict)
    """Prompt tokens charged by the claim, until the first report of the prompt."""
    index: Index = field(default_factory=Index)
    numbers: "count[int]" = field(default_factory=lambda: count(1))

    def waiting(self) -> list[Entry]:
        return [entry for lane in self.lanes.values() for entry in lane.entries()]

    def enqueue(
        self,
        job_id: str,
        tenant: str,
        tier: ServiceTier,
        prompt: int,
        need: int,
        **more: Any,
    ) -> Entry:
        weight, rank = TENANTS[tenant] * TIER_BOOSTS[tier], TIER_RANKS[tier]
        number = next(self.numbers)
        entry = Entry(rank, True, number, job_id, tenant, weight, prompt, need, tier, **more)
        self.put(entry)
        return entry

    def put(self, entry: Entry) -> None:
        self.lanes[entry.lane].put(entry)

    def claim(
        self,
        most: int,
        room: Room,
        worker: str,
        *,
        prefill_us: float,
        now_ms: int,
        adapters: AdapterRoom | None,
    ) -> list[str]:
        index = self.index
        index.begin(worker, prefill_us, now_ms)
        index.adapters = set() if adapters is None else {*adapters.used}
        index.free_slots = -1 if adapters is None else adapters.free_slots
        index.waits_for_slot = False
        index.uses = {tenant: [*numbers] for tenant, numbers in room.uses.items()}
        requests = self._claim(Lane.REQUESTS, most, room.tokens + room.preemptible_tokens)
        if self.lanes[Lane.REQUESTS].active() and not index.leaves_only_kept:
            return requests
        left = room.tokens - sum(self.running[each].entry.need for each in requests)
        prompt_room = room.batch_prompt_tokens
        for uses in index.uses.values():
            uses[:2] = uses[0] + uses[2], uses[1] + uses[3]
        return requests + self._claim(Lane.BATCH, most - len(requests), left, prompt_room)

    def _claim(self, lane: Lane, most: int, room: int, prompt_room: float = math.inf) -> list[str]:
        taken: list[str] = []
        self.index.slotless.clear()
        self.index.capped.clear()
        self.index.leaves_only_kept, reached = False, 0.0
        counters = self.lanes[lane].counters
        while len(taken) < most:
            is_full = prompt_room <= 0
            entry = self.lanes[lane].next(self.index, room)
            self.index.leaves_only_kept = entry is None and not self.index.slotless
            if entry is not None:
                reached = counters[entry.tenant]
            if entry is None or is_full or entry.need > room:
                break
            self.index.take_slot(entry.adapter)
            uses = self.index.uses.setdefault(entry.tenant, [0, 0, 0, 0])
            uses[:2] = uses[0] + 1, uses[1] + entry.need
            room, prompt_room = room - entry.need, prompt_room - entry.prompt
            attempt = self.attempts[entry.job_id] = self.attempts.get(entry.job_id, 0) + 1
            if attempt == 1:
                uncached = entry.prompt - self.index.cached(entry)
                self.uncached[entry.job_id] = uncached
                counters[entry.tenant] += PROMPT_COST * uncached / entry.weight
            self.lanes[lane].remove(entry)
            if entry.session_of_tenant:
                self.index.sessions[entry.session_of_tenant] = self.index.worker
            started = entry._replace(is_fresh=False)
            self.running[entry.job_id] = Running(started, attempt, self.index.worker)
            taken.append(entry.job_id)
        for tenant in self.index.capped:
            counters[tenant] = max(counters[tenant], reached)
        return taken

    def uses(self, worker: str) -> dict[str, list[int]]:
        """Return what the tenants with shares use of a worker, as `Room.uses`."""
        uses = {tenant: [0, 0, 0, 0] for tenant in SHARES}
        for running in self.running.values():
            entry = running.entry
            if running.worker == worker and entry.tenant in SHARES:
                at = 2 * (entry.lane is Lane.BATCH)
                uses[entry.tenant][at] += 1
                uses[entry.tenant][at + 1] += entry.need
        return uses

    def charge(self, report: LeaseReport) -> None:
        job_id, total = report.job_id, report.completion_tokens
        running, charged = self.running[job_id], self.charged.get(job_id, 0)
        running.completion = total
        new, prompt = max(total - charged, 0), 0
        if report.prompt_tokens and job_id in self.uncached:
            prompt = report.prompt_tokens - report.cached_tokens - self.uncached.pop(job_id)
        counters, tenant = self.lanes[running.entry.lane].counters, running.entry.tenant
        if new or prompt:
            cost = COMPLETION_COST * new + PROMPT_COST * prompt
            counters[tenant] = counters.get(tenant, 0.0) + cost / running.entry.weight
        self.charged[job_id] = max(charged, total)

    def cancel(self, entry: Entry) -> None:
        if entry.job_id in self.running:
            self.running[entry.job_id].is_cancelled = True
        else:
            self.lanes[entry.lane].remove(entry)

    def requeue(self, job_id: str, *, is_returned: bool = False) -> bool:
        if self.running[job_id].is_cancelled:
            return False
        self.index.forget(job_id)
        if is_returned:
            self.index.returned.add(job_id)
        self.put(self.running.pop(job_id).entry)
        return True

    def revive(self, entry: Entry) -> None:
        self.index.forget(entry.job_id)
        if entry.job_id in self.running:
            self.put(self.running.pop(entry.job_id).entry)
        elif entry.job_id in self.ended:
            # Its receipt has no position: it is the last one of its tier. Its counts are charged.
            self.charged[entry.job_id] = self.ended.pop(entry.job_id).completion
            self.put(entry.promoted(entry.tier)._replace(number=next(self.numbers)))

    def promote(self, entry: Entry, tier: ServiceTier) -> bool:
        if entry.job_id in self.ended or entry.rank <= TIER_RANKS[tier]:
            return False
        if entry.job_id in self.running:
            self.running[entry.job_id].entry = entry.promoted(tier)
            return True
        lane, promoted = self.lanes[entry.lane], entry.promoted(tier)
        if promoted.lane is entry.lane:
            lane.queues[entry.tenant].remove(entry)
            insort(lane.queues[entry.tenant], promoted)
        else:
            lane.remove(entry)
            self.put(promoted)
        return True


@dataclass
class History:
    """A queue and the model, to which the same steps apply."""

    queue: JobQueue
    rng: random.Random
    clock: TestClock
    model: Model = field(default_factory=Model)
    ids: "count[int]" = field(default_factory=count)

    async def enqueue(self) -> None:
        rng, job_id = self.rng, f"j{next(self.ids)}"
        tenant, tier = rng.choice(list(TENANTS)), rng.choice(list(ServiceTier))
        prompt, new = rng.randint(1, 300), rng.randint(1, 40)
        entry = self.model.enqueue(
            job_id,
            tenant,
            tier,
            prompt,
            prompt + new,
            chat=rng.randrange(CHATS),
            adapter=rng.choice(["", "", "", *ADAPTERS]),
            session=rng.choice(["", "s", "t"]),
        )
        await enqueue(self.queue, _job(entry), weight=TENANTS[tenant])

    async def claim(self) -> None:
        rng, most = self.rng, self.rng.randint(1, 4)
        worker, prefill_us = rng.choice(WORKERS), rng.choice([0, 100, 500, 5_000])
        room = Room(
            rng.randint(20, 1000),
            10**6,
            1,
            empty=False,
            preemptible_tokens=rng.randint(0, 100),
            batch_prompt_tokens=rng.randint(0, 200),
            uses=self.model.uses(worker),
            **ENGINE,
        )
        used = rng.sample(ADAPTERS, rng.randrange(2))
        adapters = rng.choice([None, AdapterRoom(used, 0), AdapterRoom(used, 1)])
        result = await self.queue.claim(
            worker,
            room,
            most_jobs=most,
            lease_ms=LEASE_MS,
            affinity=Affinity(PATIENCE_MS, prefill_us, KEEP_MS),
            adapters=adapters,
        )
        expected = self.model.claim(
            most,
            room,
            worker,
            prefill_us=prefill_us,
            now_ms=self.clock.now_ms,
            adapters=adapters,
        )
        assert [each.job.id for each in result.claims] == expected
        index = self.model.index
        assert result.waits_for_slot is index.waits_for_slot

    async def hold(self) -> None:
        """Let a worker hold the prefixes of some chats, and no others."""
        rng, index = self.rng, self.model.index
        worker, held = rng.choice(WORKERS), set[Prefix]()
        for chat in range(CHATS):
            most = rng.choice([0, 100, 300])
            held.update((chat, step) for step in boundaries(BLOCK) if step < most)
        removed, added = index.held[worker] - held, held - index.held[worker]
        index.held[worker] = held
        for each in removed:
            if index.holders.get(each) == worker:
                del index.holders[each]
        index.holders.update(dict.fromkeys(added, worker))
        await self.queue.hold(
            worker,
            removed=[*map(_digest, removed)],
            added=[*map(_digest, added)],
            ttl_ms=LEASE_MS,
        )

    async def announce(self) -> None:
        """Let a worker claim jobs, or drain."""
        worker, index = self.rng.choice(WORKERS), self.model.index
        is_draining = worker in index.announced
        await announce(self.queue, worker, is_draining=is_draining)
        index.announced ^= {worker}
        if is_draining:
            index.held[worker] = set()

    async def advance(self) -> None:
        await self.clock.advance(self.rng.randint(1, PATIENCE_MS))

    async def charge(self) -> None:
        if report := self._report():
            self.model.charge(report)
            lost = await self.queue.extend(self._worker(report), [report], lease_ms=LEASE_MS)
            assert bool(lost) is self.model.running[report.job_id].is_cancelled

    async def finish(self) -> None:
        if report := self._report():
            self.model.charge(report)
            assert await self.queue.finish(self._worker(report), report)
            self.model.uncached.pop(report.job_id, None)
            self.model.ended[report.job_id] = self.model.running.pop(report.job_id)

    async def cancel(self) -> None:
        known = self.model.waiting() + [running.entry for running in self.model.running.values()]
        if known:
            entry = self.rng.choice(known)
            assert await self.queue.cancel(entry.job_id, entry.tenant)
            self.model.cancel(entry)

    async def requeue(self) -> None:
        if report := self._report():
            entry = self.model.running[report.job_id].entry
            worker = self._worker(report)
            self.model.charge(report)
            await self.queue.extend(worker, [report], lease_ms=0)
            result = await self.queue.requeue(_job(entry), report.attempt)
            if self.model.requeue(report.job_id):
                assert result is RequeueResult.REQUEUED
            else:
                assert result is RequeueResult.ENDED
                # It was cancelled; its worker returns to end it.
                await self.queue.extend(worker, [report], lease_ms=LEASE_MS)

    async def return_(self) -> None:
        if report := self._report():
            entry, attempt = self.model.running[report.job_id].entry, report.attempt
            result = await self.queue.requeue(_job(entry), attempt, is_returned=True)
            may = self.model.requeue(report.job_id, is_returned=True)
            assert result is (RequeueResult.REQUEUED if may else RequeueResult.ENDED)

    async def revive(self) -> None:
        if known := self._known():
            entry = self.rng.choice(known)
            weight = TENANTS[entry.tenant]
            over = await self.queue.revive(_job(entry), weight=weight, attempt=0)
            assert over == self.model.attempts.get(entry.job_id, 0)
            self.model.revive(entry)

    async def promote(self) -> None:
        if known := self._known():
            tenant = self.rng.choice(known).tenant
            tier = self.rng.choice([PRIORITY, DEFAULT, FLEX])
            some = [entry for entry in known if entry.tenant == tenant][:3]
            raised = sum(self.model.promote(entry, tier) for entry in some)
            ids = ["unknown", *(entry.job_id for entry in some)]
            assert await self.queue.promote(ids, tenant, tier) == raised
            assert await self.queue.promote(ids, tenant, tier) == 0

    def _known(self) -> list[Entry]:
        left = [*self.model.running.values(), *self.model.ended.values()]
        return self.model.waiting() + [each.entry for each in left]

    def _report(self) -> LeaseReport | None:
        if not self.model.running:
            return None
        job_id, running = self.rng.choice(list(self.model.running.items()))
        prompt = self.rng.choice([0, running.entry.prompt])
        return LeaseReport(
            job_id,
            running.attempt,
            running.completion + self.rng.randint(0, 30),
            prompt,
            self.rng.randint(0, prompt),
        )

    def _worker(self, report: LeaseReport) -> str:
        return self.model.running[report.job_id].worker


async def announce(queue: JobQueue, worker: str, *, is_draining: bool = False) -> None:
    state = WorkerState.DRAINING if is_draining else WorkerState.READY
    card = WorkerCard(id=worker, model=MODEL, state=state, engine="e", created=0)
    await queue.announce(card, ttl_ms=LEASE_MS)


def _job(entry: Entry) -> GenerationJob:
    token_ids = packed([entry.chat] * entry.prompt)
    return job(
        entry.job_id,
        entry.tenant,
        prompt_tokens=entry.prompt,
        max_tokens=entry.need - entry.prompt,
        service_tier=entry.tier,
        affinity=prefix_affinity("salt", token_ids, BLOCK)
        + session_affinity("salt", entry.session, token_ids),
        adapter=AdapterRef(entry.adapter, 8, 1000) if entry.adapter else None,
        model_share=SHARES.get(entry.tenant, 100),
    )


def _digest(prefix: Prefix) -> bytes:
    chat, step = prefix
    return prefix_affinity("salt", packed([chat] * (step + 1)), BLOCK)[:DIGEST_BYTES]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))]
)
async def test_scripts_equal_the_model_on_a_random_history(
    any_redis: "Redis", clock: TestClock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("contract.queue.AFFINITY_QUANTUM", QUANTUM)
    rng, redis = random.Random(seed), any_redis
    history = History(JobQueue(redis, MODEL), rng, clock)
    model = history.model
    for _ in range(250):
        (action,) = rng.choices(list(ACTIONS), list(ACTIONS.values()))
        await getattr(history, action)()
        for name, lane in model.lanes.items():
            counters = await redis.hgetall(keys.service_counters(MODEL, name))
            assert {text(t): float(c) for t, c in counters.items()} == pytest.approx(lane.counters)
            active = await redis.zrange(keys.active_tenants(MODEL, name), 0, -1)
            assert {text(t) for t in active} == set(lane.active())
            fresh: Any = await redis.zrange(keys.sheddable(MODEL, name), 0, -1, withscores=True)
            assert {text(member): int(score) % 2**40 for member, score in fresh} == lane.fresh()
            assert int(await redis.get(keys.waiting(MODEL, name)) or 0) == len(lane.entries())
            assert await redis.zcard(keys.arrivals(MODEL, name)) == len(lane.entries())
    for name, lane in model.lanes.items():
        for tenant, entries in lane.queues.items():
            waiting = await redis.zrange(keys.queue(MODEL, tenant, name), 0, -1)
            assert [text(job_id) for job_id in waiting] == [entry.job_id for entry in entries]


@pytest.mark.parametrize(
    ("tiers", "ratio"),
    [
        pytest.param({"a": DEFAULT, "b": DEFAULT}, 1.0, id="alike"),
        pytest.param({"a": PRIORITY, "b": DEFAULT}, 2.0, id="priority", marks=pytest.mark.long),
        pytest.param({"a": FLEX, "b": DEFAULT}, 0.5, id="flex", marks=pytest.mark.long),
        pytest.param({"a": PRIORITY, "b": FLEX}, 4.0, id="both"),
        pytest.param({"a": BATCH, "b": BATCH}, 1.0, id="batch", marks=pytest.mark.long),
    ],
)
async def test_service_of_two_backlogged_tenants_stays_within_the_bound(
    request: pytest.FixtureRequest, redis: "Redis", tiers: dict[str, ServiceTier], ratio: float
) -> None:
    """|W_a - W_b| <= 2 max(w_p L, w_q M) for one worker that reports every step (OSDI'24, theorem).

    W is service by weight, and so is the bound, by the lower weight.
    """
    rng = random.Random(5)
    queue, lane = JobQueue(redis, MODEL), lane_of(tiers["a"])
    longest_prompt, batch_tokens = 400, 8 * 64
    weights = {tenant: TIER_BOOSTS[tier] for tenant, tier in tiers.items()}
    cost = max(PROMPT_COST * longest_prompt, COMPLETION_COST * batch_tokens)
    bound = 2 * cost / min(weights.values())
    sizes = {"a": (400, 64), "b": (10, 64)}
    served = {"a": 0.0, "b": 0.0}
    for tenant, (prompt, _) in sizes.items():
        fields: dict[str, Any] = {"prompt_tokens": prompt, "service_tier": tiers[tenant]}
        await enqueue(queue, *(job(f"{tenant}{i}", tenant, **fields) for i in range(400)))
    running: dict[str, list[int]] = {}
    worst = 0.0
    # More service than that shows nothing new: the bound does not grow with it.
    enough = math.inf if request.config.getoption("--long") else 5 * bound
    while min(served.values()) <= enough:
        room = PLENTY._replace(sequences=8 - len(running))
        for job_id in await claim_ids(queue, room=room):
            prompt, longest = sizes[job_id[0]]
            served[job_id[0]] += PROMPT_COST * prompt / weights[job_id[0]]
            running[job_id] = [0, rng.randint(1, longest)]
        reports = []
        for job_id, counts in list(running.items()):
            counts[0] += 1
            served[job_id[0]] += COMPLETION_COST / weights[job_id[0]]
            report = LeaseReport(job_id, 1, counts[0])
            if counts[0] == counts[1]:
                del running[job_id]
                await queue.finish("w1", report)
            else:
                reports.append(report)
        assert await queue.extend("w1", reports, lease_ms=LEASE_MS) == []
        if (await redis.zcard(keys.active_tenants(MODEL, lane))) < 2:
            break
        worst = max(worst, abs(served["a"] - served["b"]))
    assert 0 < worst <= bound
    assert min(served.values()) > 5 * bound, "the history is too short to show anything"
    share = served["a"] * weights["a"] / (served["b"] * weights["b"])
    assert share == pytest.approx(ratio, rel=0.2)


SLOTS, TOKENS, PROMPT, PREFIX = 4, 32, 400, 384
"""Sequences of a worker, most tokens of a completion, tokens of a prompt and of its last digest."""
PREFILL_US, POOL_KEEP_MS = 2_000, 15 * PATIENCE_MS
"""A kept job waits for most of that time: a prompt takes a worker 800 ms."""
WEIGHTS = {"a": 2.0, "b": 1.0}


@dataclass
class Pool:
    """Two workers that cache the prompts of a few chats each, and publish them now and then."""

    queue: JobQueue
    clock: TestClock
    rng: random.Random
    cached: dict[str, list[int]] = field(default_factory=lambda: {"w1": [], "w2": []})
    running: dict[str, list[Any]] = field(default_factory=lambda: {"w1": [], "w2": []})
    waiting: dict[str, list[str]] = field(default_factory=lambda: {"a": [], "b": []})
    passed_at: dict[str, int] = field(default_factory=dict)
    draining: str = ""
    served: dict[str, float] = field(default_factory=lambda: {"a": 0.0, "b": 0.0})
    """Service units, divided by the weight."""
    hits: int = 0
    kept_jobs: int = 0

    async def enqueue(self, job_id: str, tenant: str, chat: int, session: str) -> None:
        self.waiting[tenant].append(job_id)
        affinity = prefix_affinity("salt", packed([chat] * PROMPT), BLOCK)
        # A pretended session is the same for all chats.
        affinity += session_affinity("salt", session, packed([0] * PROMPT))
        sent = job(job_id, tenant, prompt_tokens=PROMPT, affinity=affinity, handle=chat)
        await enqueue(self.queue, sent, weight=WEIGHTS[tenant])

    async def publish(self) -> None:
        for worker, chats in self.cached.items():
            if worker == self.draining:
                continue
            held = [_digest((chat, step)) for chat in chats for step in boundaries(BLOCK)[:7]]
            await self.queue.hold(worker, added=held, starts_over=True, ttl_ms=LEASE_MS)

    async def drain(self, worker: str) -> None:
        """Let a worker start again with an empty cache, and this one drain; empty: none."""
        if self.draining:
            self.cached[self.draining] = []
            await announce(self.queue, self.draining)
        if worker:
            await announce(self.queue, worker, is_draining=True)
        self.draining = worker

    async def step(self) -> None:
        for worker in self.rng.sample(["w1", "w2"], 2):
            while worker != self.draining and len(self.running[worker]) < SLOTS:
                if not await self._claim(worker):
                    break
        await self.clock.advance(20)
        for worker, running in self.running.items():
            for each in running:
                each[2] += 1
                self._serve(each[0].tenant, COMPLETION_COST)
            reports = [LeaseReport(each.id, 1, tokens) for each, _, tokens in running]
            assert await self.queue.extend(worker, reports, lease_ms=LEASE_MS) == []
            for each in [each for each in running if each[2] == each[1]]:
                running.remove(each)
                await self.queue.finish(worker, LeaseReport(each[0].id, 1, each[2]))

    async def _claim(self, worker: str) -> bool:
        affinity = Affinity(PATIENCE_MS, PREFILL_US, POOL_KEEP_MS)
        result = await self.queue.claim(
            worker, PLENTY, most_jobs=1, lease_ms=LEASE_MS, affinity=affinity
        )
        self.kept_jobs += result.kept_jobs
        for claim in result.claims:
            self._note_order(claim.job)
            chats, chat = self.cached[worker], claim.job.handle
            found = PREFIX if chat in chats else 0
            self.cached[worker] = [*[each for each in chats if each != chat][-2:], chat]
            self.hits += bool(found)
            self._serve(claim.job.tenant, PROMPT_COST * (PROMPT - found))
            report = LeaseReport(claim.job.id, 1, 0, PROMPT, found)
            await self.queue.extend(worker, [report], lease_ms=LEASE_MS)
            self.running[worker].append([claim.job, self.rng.randint(1, TOKENS), 0])
        return bool(result.claims)

    def _serve(self, tenant: str, units: int) -> None:
        self.served[tenant] += units / WEIGHTS[tenant]

    def _note_order(self, job: GenerationJob) -> None:
        waiting = self.waiting[job.tenant]
        for older in waiting[: waiting.index(job.id)]:
            passed_at = self.passed_at.setdefault(older, self.clock.now_ms)
            assert self.clock.now_ms - passed_at < POOL_KEEP_MS
        waiting.remove(job.id)


@pytest.mark.parametrize(
    "attack",
    [
        "monopolises",
        "floods",
        pytest.param("alternates", marks=pytest.mark.slow),
        "pretends",
        pytest.param("drains", marks=pytest.mark.slow),
    ],
)
async def test_no_prefixes_win_more_service_than_the_bound(
    request: pytest.FixtureRequest,
    any_redis: "Redis",
    clock: TestClock,
    monkeypatch: pytest.MonkeyPatch,
    attack: str,
) -> None:
    """|W_a - W_b| <= 2 (max(w_p L, w_q M) + Q), where W counts uncached prompt tokens only.

    Q is the prompt of a kept job, which is longer than the quantum.
    The services have the ratio of the weights, within the bound's share of them.
    """
    monkeypatch.setattr("contract.queue.AFFINITY_QUANTUM", QUANTUM)
    rng = random.Random(3)
    pool = Pool(JobQueue(any_redis, MODEL), clock, rng)
    longest = max(PROMPT_COST * PROMPT, COMPLETION_COST * 2 * SLOTS * TOKENS)
    bound = 2 * (longest + max(QUANTUM, PROMPT_COST * PROMPT))
    chats: dict[str, Callable[[int], int]] = {
        "monopolises": lambda _: 1,
        "floods": lambda number: 1_000 + number,
        "alternates": lambda number: number % 2,
        "pretends": lambda number: 1_000 + number,
        "drains": lambda number: number % 2,
    }
    session = "s" if attack == "pretends" else ""
    for worker in pool.cached:
        await announce(pool.queue, worker)
    worst, numbers = 0.0, count()
    # More service than that shows nothing new: the bound does not grow with it.
    enough = 20 if request.config.getoption("--long") else 8
    while min(pool.served.values()) < enough * bound:
        for tenant, waiting in pool.waiting.items():
            while len(waiting) < CANDIDATES + 4:
                number = next(numbers)
                chat = chats[attack](number) if tenant == "a" else 100 + rng.randrange(4)
                await pool.enqueue(
                    f"{tenant}{number}", tenant, chat, session if tenant == "a" else ""
                )
        if attack == "drains" and rng.random() < 0.05:
            await pool.drain(rng.choice(["w1", "w2", ""]))
        if rng.random() < 0.3:
            await pool.publish()
        await pool.step()
        worst = max(worst, abs(pool.served["a"] - pool.served["b"]))
    assert 0 < worst <= bound
    assert pool.served["a"] == pytest.approx(pool.served["b"], rel=1 / enough)
    assert pool.passed_at
    # In the first two, no worker holds more than another.
    assert pool.kept_jobs or attack in ("monopolises", "floods")
    assert pool.hits

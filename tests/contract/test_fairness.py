"""The scripts equal a plain model of Virtual Token Counter on random histories."""

import math
import random
from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import pytest
from redis.asyncio import Redis

from contract import keys
from contract.messages import GenerationJob
from contract.queue import (
    COMPLETION_COST,
    PROMPT_COST,
    JobQueue,
    LeaseReport,
    RequeueResult,
    Room,
)
from contract.tier import TIER_BOOSTS, TIER_RANKS, Lane, ServiceTier, lane_of
from tests.contract.test_queue import LEASE_MS, MODEL, PLENTY, claim_ids, enqueue, job, text

TENANTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0, "e": 3.0}
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
}
FLEX, DEFAULT, PRIORITY = ServiceTier.FLEX, ServiceTier.DEFAULT, ServiceTier.PRIORITY
BATCH = ServiceTier.BATCH


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
    completion: int = 0
    is_cancelled: bool = False


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
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), lift)
        insort(self.queues.setdefault(tenant, []), entry)

    def remove(self, entry: Entry) -> None:
        self.queues[entry.tenant].remove(entry)
        if not self.queues[entry.tenant]:
            self.last = entry.tenant

    def first(self) -> Entry | None:
        # Redis breaks ties between equal scores by name.
        tenant = min(self.active(), key=lambda t: (self.counters[t], t), default=None)
        return None if tenant is None else self.queues[tenant][0]


@dataclass
class Model:
    """Both lanes, and the jobs that have left them."""

    lanes: dict[Lane, LaneModel] = field(default_factory=lambda: {e: LaneModel() for e in Lane})
    running: dict[str, Running] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    charged: dict[str, int] = field(default_factory=dict)
    ended: dict[str, Running] = field(default_factory=dict)
    numbers: "count[int]" = field(default_factory=lambda: count(1))

    def waiting(self) -> list[Entry]:
        return [entry for lane in self.lanes.values() for entry in lane.entries()]

    def enqueue(self, job_id: str, tenant: str, tier: ServiceTier, prompt: int, need: int) -> None:
        weight = TENANTS[tenant] * TIER_BOOSTS[tier]
        number = next(self.numbers)
        self.put(Entry(TIER_RANKS[tier], True, number, job_id, tenant, weight, prompt, need, tier))

    def put(self, entry: Entry) -> None:
        self.lanes[entry.lane].put(entry)

    def claim(self, most: int, room: Room) -> list[str]:
        requests = self._claim(Lane.REQUESTS, most, room.tokens + room.preemptible_tokens)
        if self.lanes[Lane.REQUESTS].active():
            return requests
        left = room.tokens - sum(self.running[each].entry.need for each in requests)
        prompt_room = room.batch_prompt_tokens
        return requests + self._claim(Lane.BATCH, most - len(requests), left, prompt_room)

    def _claim(self, lane: Lane, most: int, room: int, prompt_room: float = math.inf) -> list[str]:
        taken: list[str] = []
        while len(taken) < most and (entry := self.lanes[lane].first()):
            if entry.need > room or prompt_room <= 0:
                break
            room, prompt_room = room - entry.need, prompt_room - entry.prompt
            attempt = self.attempts[entry.job_id] = self.attempts.get(entry.job_id, 0) + 1
            if attempt == 1:
                cost = PROMPT_COST * entry.prompt / entry.weight
                self.lanes[lane].counters[entry.tenant] += cost
            self.lanes[lane].remove(entry)
            self.running[entry.job_id] = Running(entry._replace(is_fresh=False), attempt)
            taken.append(entry.job_id)
        return taken

    def charge(self, job_id: str, total: int) -> None:
        running, charged = self.running[job_id], self.charged.get(job_id, 0)
        running.completion = total
        if total > charged:
            cost = COMPLETION_COST * (total - charged) / running.entry.weight
            counters, tenant = self.lanes[running.entry.lane].counters, running.entry.tenant
            counters[tenant] = counters.get(tenant, 0.0) + cost
            self.charged[job_id] = total

    def cancel(self, entry: Entry) -> None:
        if entry.job_id in self.running:
            self.running[entry.job_id].is_cancelled = True
        else:
            self.lanes[entry.lane].remove(entry)

    def requeue(self, job_id: str) -> bool:
        if self.running[job_id].is_cancelled:
            return False
        self.put(self.running.pop(job_id).entry)
        return True

    def revive(self, entry: Entry) -> None:
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
    model: Model = field(default_factory=Model)
    ids: "count[int]" = field(default_factory=count)

    async def enqueue(self) -> None:
        rng, job_id = self.rng, f"j{next(self.ids)}"
        tenant, tier = rng.choice(list(TENANTS)), rng.choice(list(ServiceTier))
        prompt, new = rng.randint(1, 90), rng.randint(1, 40)
        sent = job(job_id, tenant, prompt_tokens=prompt, max_tokens=new, service_tier=tier)
        await enqueue(self.queue, sent, weight=TENANTS[tenant])
        self.model.enqueue(job_id, tenant, tier, prompt, prompt + new)

    async def claim(self) -> None:
        rng, most = self.rng, self.rng.randint(1, 4)
        room = Room(
            rng.randint(20, 400),
            10**6,
            1,
            empty=False,
            preemptible_tokens=rng.randint(0, 100),
            batch_prompt_tokens=rng.randint(0, 200),
        )
        claimed = await claim_ids(self.queue, room=room, most_jobs=most)
        assert claimed == self.model.claim(most, room)

    async def charge(self) -> None:
        if report := self._report():
            self.model.charge(report.job_id, report.completion_tokens)
            lost = await self.queue.extend("w1", [report], lease_ms=LEASE_MS)
            assert bool(lost) is self.model.running[report.job_id].is_cancelled

    async def finish(self) -> None:
        if report := self._report():
            self.model.charge(report.job_id, report.completion_tokens)
            assert await self.queue.finish("w1", report)
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
            self.model.charge(report.job_id, report.completion_tokens)
            await self.queue.extend("w1", [report], lease_ms=0)
            result = await self.queue.requeue(_job(entry), report.attempt)
            if self.model.requeue(report.job_id):
                assert result is RequeueResult.REQUEUED
            else:
                assert result is RequeueResult.ENDED
                # It was cancelled; its worker returns to end it.
                await self.queue.extend("w1", [report], lease_ms=LEASE_MS)

    async def return_(self) -> None:
        if report := self._report():
            entry, attempt = self.model.running[report.job_id].entry, report.attempt
            result = await self.queue.requeue(_job(entry), attempt, is_returned=True)
            may = self.model.requeue(report.job_id)
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
        return LeaseReport(job_id, running.attempt, running.completion + self.rng.randint(0, 30))


def _job(entry: Entry) -> GenerationJob:
    return job(
        entry.job_id,
        entry.tenant,
        prompt_tokens=entry.prompt,
        max_tokens=entry.need - entry.prompt,
        service_tier=entry.tier,
    )


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))]
)
async def test_scripts_equal_the_model_on_a_random_history(redis: "Redis", seed: int) -> None:
    rng = random.Random(seed)
    history = History(JobQueue(redis, MODEL), rng)
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

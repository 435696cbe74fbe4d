"""Claims of jobs with adapters: workers have slots for some of them, or none."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import pytest
from redis.asyncio import Redis

from contract import keys
from contract.messages import AdapterRef, GenerationJob
from contract.queue import AdapterRoom, JobQueue, LeaseReport
from tests.contract.test_queue import LEASE_MS, MODEL, PLENTY, claim_ids, enqueue, job


@pytest.fixture
def queue(any_redis: "Redis") -> JobQueue:
    """An empty queue."""
    return JobQueue(any_redis, MODEL)


def adapted(job_id: str, tenant: str, digest: str) -> GenerationJob:
    return job(job_id, tenant, adapter=AdapterRef(digest, 8, 1000))


async def claim(
    queue: JobQueue, *used: str, free: int, most_jobs: int = 100
) -> tuple[list[str], bool]:
    """Claim with some adapters in use. Return the ids, and whether a job waits for a slot."""
    room = AdapterRoom([*used], free)
    result = await queue.claim("w1", PLENTY, most_jobs=most_jobs, lease_ms=LEASE_MS, adapters=room)
    return [each.job.id for each in result.claims], result.waits_for_slot


async def test_worker_without_adapters_leaves_their_jobs_to_others(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await enqueue(queue, adapted("a1", "a", "red"), job("a2", "a"))
    await enqueue(queue, job("b1", "b"), adapted("b2", "b", "red"))
    assert await claim_ids(queue) == ["b1"]
    # Another worker is woken for the rest.
    assert await any_redis.llen(keys.doorbell(MODEL)) > 0
    assert await claim(queue, free=1) == (["a1", "a2", "b2"], False)
    assert await any_redis.llen(keys.doorbell(MODEL)) == 0


async def test_jobs_take_the_free_slots_and_share_those_in_use(queue: JobQueue) -> None:
    await enqueue(queue, *(adapted(f"a{n}", "a", name) for n, name in enumerate(("red", "blue"))))
    await enqueue(queue, *(adapted(f"b{n}", "b", name) for n, name in enumerate(("red", "green"))))
    assert await claim(queue, "red", free=1) == (["a0", "b0", "a1"], True)
    assert await claim(queue, "red", "blue", free=0) == ([], True)
    assert await claim(queue, "red", free=1) == (["b1"], False)


async def test_slot_is_left_for_the_tenant_whose_turn_it_is(queue: JobQueue) -> None:
    # `a` uses the slot all the time. `b` has had less, so `a` gets no more until `b` has it.
    await enqueue(queue, job("a0", "a", prompt_tokens=50))
    assert await claim(queue, free=0) == (["a0"], False)
    await enqueue(queue, adapted("a1", "a", "red"), adapted("a2", "a", "red"))
    await enqueue(queue, adapted("b1", "b", "blue"))
    # Both wait at the same counter; `a` is first by name.
    assert await claim(queue, "red", free=0, most_jobs=1) == (["a1"], False)
    await enqueue(queue, job("c1", "c"))
    claimed, waits = await claim(queue, "red", free=0)
    assert (claimed, waits) == (["c1"], True)
    assert await claim(queue, free=1, most_jobs=1) == (["b1"], False)
    assert await claim(queue, "blue", free=0) == ([], True)
    assert await claim(queue, free=1) == (["a2"], False)


async def test_full_worker_learns_which_jobs_lack_a_slot(queue: JobQueue) -> None:
    await enqueue(queue, adapted("a1", "a", "red"))
    await enqueue(queue, job("b1", "b"))
    await enqueue(queue, adapted("c1", "c", "blue"))
    await enqueue(queue, adapted("d1", "d", "green"))
    full, used = PLENTY._replace(sequences=0), AdapterRoom(["blue"], 0)
    result = await queue.claim("w1", full, most_jobs=9, lease_ms=LEASE_MS, adapters=used)
    # `c` would keep the slot in use that `a` waits for.
    lack = [(each.tenant, each.lacks_slot) for each in result.next_jobs]
    assert (lack, result.waits_for_slot) == ([("a", True), ("b", False), ("d", True)], True)
    free = AdapterRoom(["blue"], 1)
    result = await queue.claim("w1", full, most_jobs=9, lease_ms=LEASE_MS, adapters=free)
    lack = [(each.tenant, each.lacks_slot) for each in result.next_jobs]
    assert lack == [(tenant, False) for tenant in "abcd"]


async def test_load_is_charged_to_the_tenant_of_a_leased_job(
    queue: JobQueue, any_redis: "Redis"
) -> None:
    await enqueue(queue, adapted("a1", "a", "red"), weight=2.0)
    assert await claim(queue, free=1) == (["a1"], False)
    before = float(await any_redis.hget(keys.service_counters(MODEL), "a") or 0)
    assert not await queue.charge("w2", "a1", 1, 300)
    assert not await queue.charge("w1", "a1", 2, 300)
    assert await queue.charge("w1", "a1", 1, 300)
    after = float(await any_redis.hget(keys.service_counters(MODEL), "a") or 0)
    assert after - before == 150


TOKENS = 6
"""Completion tokens of jobs with an adapter, and steps that they run."""


@dataclass
class Engine:
    """A worker with one slot and four sequences that reports each step."""

    queue: JobQueue
    base_tokens: int
    """Completion tokens of other jobs."""
    left: dict[str, int] = field(default_factory=dict)
    """Steps left of running jobs."""
    slot: str = ""
    """The adapter of the last job that had one."""
    ids: "count[int]" = field(default_factory=count)

    def tokens(self, job_id: str) -> int:
        """Return the completion tokens of a job."""
        return self.base_tokens if job_id.startswith("base") else TOKENS

    def holders(self) -> set[str]:
        """Return the running jobs with an adapter."""
        return {each for each in self.left if not each.startswith("base")}

    async def add(self, tenant: str, adapter: str = "") -> None:
        """Enqueue a job."""
        job_id = f"{adapter or 'base'}{next(self.ids)}"
        await enqueue(
            self.queue, adapted(job_id, tenant, adapter) if adapter else job(job_id, tenant)
        )

    async def step(self) -> None:
        """Run a step, and claim what fits."""
        reports = []
        for job_id in [*self.left]:
            self.left[job_id] -= 1
            report = LeaseReport(job_id, 1, self.tokens(job_id) - self.left[job_id])
            if self.left[job_id]:
                reports.append(report)
            else:
                del self.left[job_id]
                assert await self.queue.finish("w1", report)
        assert await self.queue.extend("w1", reports, lease_ms=LEASE_MS) == []
        used = [self.slot] if self.holders() else []
        result = await self.queue.claim(
            "w1",
            PLENTY._replace(sequences=4 - len(self.left)),
            most_jobs=16,
            lease_ms=LEASE_MS,
            adapters=AdapterRoom(used, 1 - len(used)),
        )
        for each in result.claims:
            self.left[each.job.id] = self.tokens(each.job.id)
            self.slot = each.job.adapter.digest if each.job.adapter else self.slot


async def test_flood_overtakes_a_job_only_until_those_with_its_slot_end(queue: JobQueue) -> None:
    engine = Engine(queue, base_tokens=2)

    async def step() -> None:
        # New tenants start at the lowest counter, that of the waiting one, whose name goes first.
        await engine.add(f"c{next(engine.ids)}", "blue")
        for _ in range(4):
            await engine.add("b")
        await engine.step()

    await step()
    await engine.add("a", "red")
    holders = engine.holders()
    assert holders
    steps = 0
    while engine.slot != "red":
        await step()
        steps += 1
        assert engine.slot == "red" or engine.holders() <= holders
    assert 1 < steps <= TOKENS
    assert any(each.startswith("base") for each in engine.left)


async def test_tenants_before_the_waiting_one_hold_its_slot_within_the_bound(
    queue: JobQueue,
) -> None:
    """The wait is at most `L + n (3 U + Q + 4 E) / 2` steps; here, `Q` and `E` are 0."""
    engine, tenants = Engine(queue, base_tokens=40), ("A", "B", "C")
    # `a` has had far more than the others, and gets more while it waits.
    await enqueue(queue, job("ended", "a"), weight=0.001)
    assert await claim(queue, free=1) == (["ended"], False)
    assert await queue.finish("w1", LeaseReport("ended", 1, 0))
    await engine.add("a")
    await engine.step()
    await engine.add("A", "blue")
    await engine.step()
    await engine.add("a", "red")
    served = Counter[str]()
    steps = 0
    while engine.slot != "red":
        # Each goes before `a` at the same counter, and comes when the slot would be free.
        if not any(engine.left[each] > 1 for each in engine.holders()):
            tenant = min(tenants, key=lambda each: served[each])
            served[tenant] += 1
            await engine.add(tenant, "blue")
        await engine.step()
        steps += 1
        longest_batch = engine.base_tokens + 3 * TOKENS
        assert steps <= TOKENS + len(tenants) * 3 * (2 * longest_batch) / 2
    assert steps > TOKENS * len(tenants)

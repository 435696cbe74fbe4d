"""The scripts against a plain model of Virtual Token Counter, on random histories, and its bound."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from redis.asyncio import Redis

from contract import keys
from contract.queue import COMPLETION_COST, PROMPT_COST, JobQueue, LeaseReport, Room
from tests.contract.test_queue import LEASE_MS, MODEL, PLENTY, claim_ids, enqueue, job, text

TENANTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 1.0, "e": 3.0}


@dataclass
class Model:
    """VTC as the paper has it, in a few lines of Python."""

    counters: dict[str, float] = field(default_factory=dict)
    queues: dict[str, deque[tuple[str, int, int]]] = field(default_factory=dict)
    running: dict[str, tuple[str, int]] = field(default_factory=dict)
    last: str | None = None

    def active(self) -> list[str]:
        return [t for t, q in self.queues.items() if q]

    def enqueue(self, tenant: str, job_id: str, prompt: int, need: int) -> None:
        if not self.queues.get(tenant):
            if self.active():
                lift = min(self.counters[t] for t in self.active())
            else:
                lift = self.counters.get(self.last, 0.0) if self.last else 0.0
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), lift)
        self.queues.setdefault(tenant, deque()).append((job_id, prompt, need))

    def claim(self, most: int, room: int) -> list[str]:
        taken: list[str] = []
        while len(taken) < most and self.active():
            # Redis breaks ties between equal scores by name.
            tenant = min(self.active(), key=lambda t: (self.counters[t], t))
            job_id, prompt, need = self.queues[tenant][0]
            if need > room:
                break
            room -= need
            self.queues[tenant].popleft()
            self.counters[tenant] += PROMPT_COST * prompt / TENANTS[tenant]
            self.running[job_id] = (tenant, 0)
            taken.append(job_id)
            if not self.queues[tenant]:
                self.last = tenant
        return taken

    def charge(self, job_id: str, total: int) -> None:
        tenant, charged = self.running[job_id]
        if total > charged:
            self.counters[tenant] += COMPLETION_COST * (total - charged) / TENANTS[tenant]
            self.running[job_id] = (tenant, total)

    def cancel(self, tenant: str, job_id: str) -> None:
        if job_id in self.running:
            del self.running[job_id]
            return
        waiting = [entry for entry in self.queues[tenant] if entry[0] != job_id]
        self.queues[tenant] = deque(waiting)
        if not waiting:
            self.last = tenant


@pytest.mark.parametrize("seed", range(12))
async def test_scripts_equal_the_model_on_a_random_history(redis: "Redis", seed: int) -> None:
    rng = random.Random(seed)
    queue, model = JobQueue(redis, MODEL), Model()
    tenant_of: dict[str, str] = {}
    for step in range(250):
        action = rng.choices(["enqueue", "claim", "charge", "finish", "cancel"], [5, 4, 3, 2, 1])[0]
        if action == "enqueue":
            tenant, prompt, new = rng.choice(list(TENANTS)), rng.randint(1, 90), rng.randint(1, 40)
            job_id = f"j{step}"
            tenant_of[job_id] = tenant
            await enqueue(
                queue,
                job(job_id, tenant, prompt_tokens=prompt, max_tokens=new),
                weight=TENANTS[tenant],
            )
            model.enqueue(tenant, job_id, prompt, prompt + new)
        elif action == "claim":
            most, room = rng.randint(1, 4), rng.randint(20, 400)
            claimed = await claim_ids(queue, room=Room(room, 10**6, 1, empty=False), most_jobs=most)
            assert claimed == model.claim(most, room)
        elif action in ("charge", "finish") and model.running:
            job_id = rng.choice(list(model.running))
            report = LeaseReport(job_id, 1, model.running[job_id][1] + rng.randint(0, 30))
            model.charge(job_id, report.completion_tokens)
            if action == "charge":
                assert await queue.extend("w1", [report], lease_ms=LEASE_MS) == []
            else:
                assert await queue.finish("w1", report)
                del model.running[job_id]
        elif action == "cancel":
            waiting = [entry[0] for tenant in model.active() for entry in model.queues[tenant]]
            known = waiting + list(model.running)
            if known:
                job_id = rng.choice(known)
                assert await queue.cancel(job_id, tenant_of[job_id])
                model.cancel(tenant_of[job_id], job_id)
        counters = await redis.hgetall(keys.service_counters(MODEL))
        assert {text(t): float(c) for t, c in counters.items()} == pytest.approx(model.counters)
        active = await redis.zrange(keys.active_tenants(MODEL), 0, -1)
        assert {text(t) for t in active} == set(model.active())


async def test_service_of_two_backlogged_tenants_stays_within_the_bound(redis: "Redis") -> None:
    """|W_a - W_b| <= 2 max(w_p L, w_q M) for one worker that reports every step (OSDI'24, theorem)."""
    rng = random.Random(5)
    queue = JobQueue(redis, MODEL)
    longest_prompt, batch_tokens = 400, 8 * 64
    bound = 2 * max(PROMPT_COST * longest_prompt, COMPLETION_COST * batch_tokens)
    sizes = {"a": (400, 64), "b": (10, 64)}
    served = {"a": 0.0, "b": 0.0}
    for i in range(160):
        for tenant, (prompt, _) in sizes.items():
            await enqueue(queue, job(f"{tenant}{i}", tenant, prompt_tokens=prompt))
    running: dict[str, list[int]] = {}
    worst = 0.0
    for _ in range(1500):
        room = PLENTY._replace(sequences=8 - len(running))
        for job_id in await claim_ids(queue, room=room):
            prompt, longest = sizes[job_id[0]]
            served[job_id[0]] += PROMPT_COST * prompt
            running[job_id] = [0, rng.randint(1, longest)]
        for job_id, counts in list(running.items()):
            counts[0] += 1
            served[job_id[0]] += COMPLETION_COST
            report = LeaseReport(job_id, 1, counts[0])
            if counts[0] == counts[1]:
                del running[job_id]
                await queue.finish("w1", report)
            else:
                await queue.extend("w1", [report], lease_ms=LEASE_MS)
        if (await redis.zcard(keys.active_tenants(MODEL))) < 2:
            break
        worst = max(worst, abs(served["a"] - served["b"]))
    assert 0 < worst <= bound
    assert min(served.values()) > 5 * bound, "the history is too short to show anything"

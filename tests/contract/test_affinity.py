"""Jobs go to the workers that hold their prefixes, without a change to what tenants get."""

from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from contract import keys
from contract.affinity import (
    DIGEST_BYTES,
    MOST_PREFIXES,
    boundaries,
    class_affinity,
    class_digest,
    prefix_affinity,
    resource_affinity,
    resource_digest,
    session_affinity,
)
from contract.messages import GenerationJob, WorkerCard, WorkerState
from contract.prompts import packed
from contract.queue import (
    AFFINITY_QUANTUM,
    MISSING_MS,
    Affinity,
    ClaimResult,
    JobQueue,
    LeaseReport,
)
from contract.tier import ServiceTier
from tests.contract.test_fairness import announce
from tests.contract.test_queue import LEASE_MS, MODEL, PLENTY, enqueue, job
from tests.gateway.limits.building import TestClock
from tests.support.kinds import every_redis

BLOCK = 16
PATIENCE_MS, KEEP_MS = 1_000, 15_000
TTL_MS = 60_000
RECORD = DIGEST_BYTES + 4


@pytest.fixture
def queue(any_redis: "Redis", clock: TestClock) -> JobQueue:
    """An empty queue."""
    return JobQueue(any_redis, MODEL)


def chat(
    job_id: str, number: int, tokens: int = 200, tenant: str = "a", **more: Any
) -> GenerationJob:
    """Make a job of a chat: chats of different numbers share no prefix."""
    token_ids = packed([number] * tokens)
    affinity = prefix_affinity("salt", token_ids, BLOCK) + more.pop("resources", b"")
    affinity += session_affinity("salt", more.pop("session", ""), token_ids)
    return job(job_id, tenant, prompt_tokens=tokens, affinity=affinity, **more)


def digests_of(affinity: bytes) -> list[bytes]:
    return [affinity[start : start + DIGEST_BYTES] for start in range(0, len(affinity), RECORD)]


def digests(*numbers: int, tokens: int = 200) -> list[bytes]:
    """Return the digests of what a worker holds that has run the last turns of these chats."""
    return digests_of(
        b"".join(prefix_affinity("salt", packed([n] * tokens), BLOCK) for n in numbers)
    )


async def claim(
    queue: JobQueue, worker: str, most_jobs: int = 1, *, prefill_us: float = 0.0, **room: Any
) -> ClaimResult:
    return await queue.claim(
        worker,
        PLENTY._replace(**room),
        most_jobs=most_jobs,
        lease_ms=LEASE_MS,
        affinity=Affinity(PATIENCE_MS, prefill_us, KEEP_MS),
    )


async def claim_ids(queue: JobQueue, worker: str, most_jobs: int = 1, **more: Any) -> list[str]:
    return [each.job.id for each in (await claim(queue, worker, most_jobs, **more)).claims]


async def counters(redis: "Redis") -> dict[str, float]:
    found: dict[Any, Any] = await redis.hgetall(keys.service_counters(MODEL))
    return {tenant.decode(): float(counter) for tenant, counter in found.items()}


def test_prompts_share_the_digests_of_their_common_prefix() -> None:
    start, tokens = packed(range(300)), packed([*range(300), *range(1000)])
    records = [prefix_affinity("salt", each, BLOCK) for each in (start, tokens)]
    first, second = (
        {each[i + 8 : i + 12]: each[i : i + 8] for i in range(0, len(each), RECORD)}
        for each in records
    )
    shared = [step.to_bytes(4, "big") for step in (64, 96, 128, 192, 256)]
    assert list(first) == shared[::-1]
    assert first.items() <= second.items()
    assert not set(first.values()) & set(digests_of(prefix_affinity("other", start, BLOCK)))
    assert len(set(second.values())) == len(second)
    # What fills only a part of a block is not cached, and the last token is never.
    assert boundaries(128)[:4] == (128, 256, 384, 512)
    assert len(prefix_affinity("salt", packed(range(10_000)), 1)) == MOST_PREFIXES * RECORD
    for length, number in ((64, 0), (65, 1), (96, 1), (97, 2)):
        assert len(prefix_affinity("salt", packed(range(length)), BLOCK)) == number * RECORD
    assert prefix_affinity("salt", start, 0) == b""


def test_session_is_named_by_its_tenant_and_the_first_tokens() -> None:
    named = [
        session_affinity(salt, name, token_ids)
        for salt in ("salt", "other")
        for name in ("s", "s" * 10_000, "\ud800")
        for token_ids in (packed(range(70)), packed(range(1, 71)))
    ]
    assert len({*named}) == 12
    assert {len(each) for each in named} == {RECORD}
    assert session_affinity("salt", "s", packed(range(400))) == named[0]
    assert (
        session_affinity("salt", "s", packed(range(64)))
        == session_affinity("salt", "", packed(range(70)))
        == b""
    )


@every_redis
async def test_worker_gets_the_job_of_which_it_holds_most(
    queue: JobQueue, clock: TestClock, any_redis: "Redis"
) -> None:
    assert await queue.hold("w1", added=digests(2, 3, tokens=100), ttl_ms=TTL_MS) == 4
    assert await queue.hold("w1", added=digests(3), removed=digests(9), ttl_ms=TTL_MS) == 6
    jobs = [chat("j1", 1), chat("j2", 2), chat("j3", 3), job("plain"), chat("j3-again", 3)]
    await enqueue(queue, *jobs)
    first = await claim(queue, "w1")
    assert [each.job.id for each in first.claims] == ["j3"]
    assert first.passed_jobs == 2
    # 8 of 200 tokens are uncached: the counter grows by these, until the engine reports.
    assert await counters(any_redis) == {"a": 8}
    assert await queue.extend("w1", [LeaseReport("j3", 1, 5, 200, 0)], lease_ms=LEASE_MS) == []
    assert await queue.extend("w1", [LeaseReport("j3", 1, 5, 200, 50)], lease_ms=LEASE_MS) == []
    assert await counters(any_redis) == {"a": 200 + 2 * 5}
    assert await claim_ids(queue, "w1") == ["j3-again"]
    assert await queue.finish("w1", LeaseReport("j3-again", 1, 1, 200, 199))
    assert await counters(any_redis) == {"a": 210 + 1 + 2}
    # j2 matches up to 96 tokens, but the first job was passed over long enough.
    await clock.advance(PATIENCE_MS + 1)
    late = await claim(queue, "w1", most_jobs=3)
    assert [each.job.id for each in late.claims] == ["j1", "j2", "plain"]
    # j3-again went before the plain job too.
    assert late.affinity_seconds == 3 * PATIENCE_MS / 1000


async def test_job_waits_once_for_the_worker_that_holds_more(
    queue: JobQueue, clock: TestClock, any_redis: "Redis"
) -> None:
    await queue.hold("w1", added=digests(1), ttl_ms=TTL_MS)
    await queue.hold("w2", added=digests(1, tokens=100), ttl_ms=TTL_MS)
    await enqueue(queue, chat("j1", 1))
    # w2 would process 192 - 96 tokens in 48 ms, and evict as many.
    kept = await claim(queue, "w2", prefill_us=500)
    assert (kept.claims, kept.kept_seconds, kept.kept_jobs) == ([], 0.096, 1)
    assert await any_redis.lrange(keys.worker_doorbell(MODEL, "w1"), 0, -1) == [b"1"]
    assert await any_redis.llen(keys.doorbell(MODEL)) == 0
    await clock.advance(95)
    again = await claim(queue, "w2", prefill_us=500)
    assert (again.claims, again.kept_seconds, again.kept_jobs) == ([], 0.001, 0)
    await clock.advance(1)
    after = await claim(queue, "w2", prefill_us=500)
    assert ([each.job.id for each in after.claims], after.affinity_seconds) == (["j1"], 0.096)

    await enqueue(queue, chat("j2", 1))
    assert await claim_ids(queue, "w2", prefill_us=500) == []
    assert await claim_ids(queue, "w1", prefill_us=500) == ["j2"]
    # It waits for twice as long as w2 would process the difference, up to a bound.
    for pace, wait in ((5, 0), (50_000, 2 * 96 * 50 / 1000), (200_000, KEEP_MS / 1000)):
        await enqueue(queue, chat(f"pace-{pace}", 1))
        result = await claim(queue, "w2", prefill_us=pace)
        assert (len(result.claims), result.kept_seconds) == (not wait, wait)
        await clock.advance(max(round(wait * 1000) - 1, 0))
        assert await claim_ids(queue, "w2", prefill_us=pace) == []
        assert await claim_ids(queue, "w1") == [f"pace-{pace}"] * bool(wait)
    await enqueue(queue, chat("left", 1))
    assert (await claim(queue, "w2", prefill_us=50_000)).kept_jobs == 1
    # A worker that is gone holds nothing, and no job waits for it.
    await any_redis.delete(keys.held(MODEL, "w1"))
    await enqueue(queue, chat("j3", 1))
    assert await claim_ids(queue, "w2", 2, prefill_us=500) == ["left", "j3"]


@every_redis
async def test_turn_goes_to_the_worker_of_its_session_before_that_publishes_digests(
    queue: JobQueue, clock: TestClock, any_redis: "Redis"
) -> None:
    for worker in ("w1", "w2"):
        await announce(queue, worker)
    await enqueue(queue, chat("turn-1", 1, session="s"))
    assert await claim_ids(queue, "w1") == ["turn-1"]
    # Others of the tenant, a title of the same session, and another tenant's session of that name.
    await enqueue(queue, chat("other", 1), chat("title", 2, session="s"))
    await enqueue(queue, chat("of-b", 1, tenant="b", session="s"))
    kept = await claim(queue, "w2", 9, prefill_us=500)
    assert (len(kept.claims), kept.kept_jobs) == (3, 0)

    await enqueue(queue, chat("first", 3), chat("turn-2", 1, tokens=300, session="s"))
    kept = await claim(queue, "w2", 9, prefill_us=500)
    assert [each.job.id for each in kept.claims] == ["first"]
    assert (kept.kept_jobs, kept.kept_seconds) == (1, 0.3)
    assert await any_redis.lrange(keys.worker_doorbell(MODEL, "w1"), 0, -1) == [b"1"]
    # All of its prompt is charged.
    before = (await counters(any_redis))["a"]
    assert await claim_ids(queue, "w1") == ["turn-2"]
    assert (await counters(any_redis))["a"] == before + 300
    # Turns precede older jobs of which the worker holds nothing.
    await enqueue(queue, chat("older", 4), chat("turn-3", 1, session="s"))
    assert await claim_ids(queue, "w1", 2) == ["turn-3", "older"]
    # A client may name any session: it waits no longer than a job may be passed over, unless the
    # worker holds the longest prefix of it, such as all text before an image, and w2 little more.
    await enqueue(queue, chat("turn-4", 1, session="s"))
    kept = await claim(queue, "w2", prefill_us=20_000)
    assert (kept.claims, kept.kept_seconds) == ([], PATIENCE_MS / 1000)
    assert await claim_ids(queue, "w1") == ["turn-4"]
    for worker in ("w1", "w2"):
        await queue.hold(worker, added=digests(1), ttl_ms=TTL_MS)
    for size, wait in ((392, 2 * (392 - 192) * 20 / 1000), (383, PATIENCE_MS / 1000)):
        image = chat(f"image-{size}", 1, session="s")
        await enqueue(queue, msgspec.structs.replace(image, prompt_token_ids=packed([1] * size)))
        kept = await claim(queue, "w2", prefill_us=20_000)
        assert (kept.claims, kept.kept_seconds) == ([], wait)
    # The session moves with its jobs.
    await clock.advance(8_000)
    assert await claim_ids(queue, "w2", 2, prefill_us=20_000) == ["image-392", "image-383"]
    await enqueue(queue, chat("turn-5", 1, session="s"))
    assert (await claim(queue, "w1", prefill_us=500)).kept_jobs == 1


@pytest.mark.parametrize("holds", [True, False])
async def test_no_job_waits_for_a_worker_that_is_gone_or_drains(
    queue: JobQueue, clock: TestClock, any_redis: "Redis", holds: bool
) -> None:
    await announce(queue, "w1")
    await enqueue(queue, chat("turn-1", 1, session="s"))
    assert await claim_ids(queue, "w1") == ["turn-1"]

    async def is_kept(job_id: str) -> bool:
        if holds:
            await queue.hold("w1", added=digests(1), starts_over=True, ttl_ms=TTL_MS)
        await enqueue(queue, chat(job_id, 1, session="s"))
        result = await claim(queue, "w2", prefill_us=500)
        assert await any_redis.llen(keys.doorbell(MODEL)) == 0
        return result.kept_jobs == 1

    assert await is_kept("drains")
    await announce(queue, "w1", is_draining=True)
    assert await any_redis.lrange(keys.doorbell(MODEL), 0, -1) == [b"1"]
    await enqueue(queue, chat("later", 1, session="s"))
    result = await claim(queue, "w3", 2, prefill_us=500)
    assert [each.job.id for each in result.claims] == ["drains", "later"]
    assert result.kept_jobs == 0
    await announce(queue, "w1", is_draining=True)
    assert await any_redis.llen(keys.doorbell(MODEL)) == 0, "it has left before"

    await announce(queue, "w1")
    await enqueue(queue, chat("turn-2", 1, session="s"))
    assert await claim_ids(queue, "w1") == ["turn-2"]
    assert await is_kept("gone")
    # As after a missed heartbeat.
    await any_redis.zadd(keys.watched_workers(MODEL), {"w1": 1})
    assert await queue.gone_workers() == []
    await clock.advance(MISSING_MS)
    assert await queue.gone_workers() == ["w1"]
    assert await any_redis.lrange(keys.doorbell(MODEL), 0, -1) == [b"1"]
    assert await claim_ids(queue, "w2", prefill_us=500) == ["gone"]


async def test_sessions_are_forgotten_and_bounded_for_each_tenant(
    queue: JobQueue, clock: TestClock, any_redis: "Redis"
) -> None:
    await announce(queue, "w1")
    await enqueue(queue, chat("old", 1, session="s"), chat("new", 2, session="t"))
    assert await claim_ids(queue, "w1") == ["old"]
    await clock.advance(400_000)
    assert await claim_ids(queue, "w1") == ["new"]
    await clock.advance(300_000)
    await announce(queue, "w1")
    await enqueue(queue, chat("old-2", 1, session="s"), chat("new-2", 2, session="t"))
    result = await claim(queue, "w2", 9, prefill_us=500)
    assert ([each.job.id for each in result.claims], result.kept_jobs) == (["old-2"], 1)
    key = keys.sessions(MODEL, "b")
    await any_redis.hset(key, mapping={f"{number}": "1 w9" for number in range(1_024)})
    await enqueue(queue, *(chat(f"b{n}", n, tenant="b", session="s") for n in range(3)))
    assert len(await claim_ids(queue, "w1", 9)) == 4
    assert await any_redis.hlen(key) == 1_024
    assert 0 < await any_redis.pttl(key) <= 600_000
    assert await any_redis.hlen(keys.sessions(MODEL, "a")) == 2


async def test_kept_jobs_keep_neither_their_tenant_nor_batches_waiting(
    queue: JobQueue, clock: TestClock
) -> None:
    await queue.hold("w1", added=digests(1), ttl_ms=TTL_MS)
    await enqueue(queue, *(chat(f"kept-{number}", 1) for number in range(20)))
    await enqueue(queue, job("short"))
    await enqueue(queue, job("batch", "b", service_tier=ServiceTier.BATCH))
    result = await claim(queue, "w2", 13, prefill_us=50_000)
    # Half of the oldest sixteen wait. The others do not wait for a worker that may be full.
    assert result.kept_jobs == 8
    assert [each.job.id for each in result.claims] == [
        *(f"kept-{n}" for n in range(8, 20)),
        "short",
    ]
    assert await claim_ids(queue, "w2", prefill_us=50_000) == ["batch"]
    assert await claim_ids(queue, "w1", 9) == [f"kept-{n}" for n in range(8)]


@pytest.mark.parametrize(
    ("tokens", "weight", "allowance", "wait"),
    [
        pytest.param(200, 1.0, AFFINITY_QUANTUM, 0.192, id="quantum"),
        pytest.param(6_000, 2.0, 3_000, 4.096, id="its charge"),
    ],
)
async def test_others_overtake_kept_jobs_by_their_charge_and_at_least_by_a_quantum(
    queue: JobQueue,
    clock: TestClock,
    any_redis: "Redis",
    tokens: int,
    weight: float,
    allowance: int,
    wait: float,
) -> None:
    await queue.hold("w1", added=digests(1, tokens=tokens), ttl_ms=TTL_MS)
    await enqueue(queue, chat("kept", 1, tokens=tokens, tenant="a"), weight=weight)
    size = allowance // 2
    await enqueue(queue, *(job(f"b{i}", "b", prompt_tokens=size) for i in range(3)))
    assert await claim_ids(queue, "w2", prefill_us=500) == ["b0"]
    result = await claim(queue, "w2", 9, prefill_us=500)
    assert [each.job.id for each in result.claims] == ["b1", "b2"]
    assert result.kept_seconds == pytest.approx(wait)
    # w2 may be full, so another worker looks after the kept job.
    assert await any_redis.llen(keys.doorbell(MODEL)) == 1
    assert (await claim(queue, "w2", prefill_us=500)).claims == []
    assert await any_redis.llen(keys.doorbell(MODEL)) == 0
    # Those who wait beyond that do not wait for the other worker.
    assert (await counters(any_redis))["b"] == allowance + size
    await enqueue(queue, job("b3", "b", prompt_tokens=size))
    result = await claim(queue, "w2", prefill_us=500)
    assert [each.job.id for each in result.claims] == ["kept"]
    assert result.kept_seconds == 0


async def test_affinity_changes_no_order_of_tiers_and_of_started_jobs(
    queue: JobQueue, clock: TestClock
) -> None:
    await queue.hold("w1", added=digests(1), ttl_ms=TTL_MS)
    started = chat("started", 2)
    await enqueue(queue, started)
    assert await claim_ids(queue, "w2") == ["started"]
    await queue.requeue(started, 1, is_returned=True)
    urgent = chat("urgent", 3, service_tier=ServiceTier.PRIORITY)
    await enqueue(queue, urgent)
    await enqueue(queue, chat("new", 4), chat("match", 1))
    await enqueue(queue, chat("lazy", 1, service_tier=ServiceTier.FLEX))
    assert await claim_ids(queue, "w1", 9) == ["urgent", "started", "match", "new", "lazy"]
    # A job that has started waits only for the worker that returned it to make room.
    await queue.hold("w2", added=digests(2), ttl_ms=TTL_MS)
    await queue.requeue(started, 2, is_returned=True)
    assert await claim_ids(queue, "w1", prefill_us=500) == []
    assert await claim_ids(queue, "w2", prefill_us=500) == ["started"]
    await clock.advance(LEASE_MS)
    await queue.requeue(started, 3)
    assert await claim_ids(queue, "w1", prefill_us=500) == ["started"]
    # One that does not fit makes none wait.
    await enqueue(queue, chat("small", 3, tokens=100), chat("large", 1))
    assert await claim_ids(queue, "w1", tokens=150) == ["small"]
    # A revived job keeps its affinity.
    await queue.revive(chat("large", 1), weight=1.0, attempt=0)
    await enqueue(queue, chat("next", 5))
    assert await claim_ids(queue, "w1", 9) == ["large", "next"]


@every_redis
async def test_started_job_is_left_for_any_worker_of_its_class_while_one_claims(
    queue: JobQueue, clock: TestClock, any_redis: "Redis"
) -> None:
    """A worker `wN` has the class N, and `w0` is of a release without classes."""
    for number in range(3):
        await announce(queue, f"w{number}")
    for worker in ("w1", "w11"):
        await queue.hold(worker, added=[class_digest("1"), *digests(9)], ttl_ms=TTL_MS)
    await queue.hold("w2", added=[class_digest("2"), *digests(1)], ttl_ms=TTL_MS)

    jobs = [chat(f"j{number}", 1) for number in range(12)]
    await enqueue(queue, *jobs)
    assert len(await claim_ids(queue, "w1", 12)) == 12
    for number, each in enumerate(jobs):
        affinity = class_affinity("1") + each.affinity
        jobs[number] = again = msgspec.structs.replace(each, affinity=affinity)
        await queue.requeue(again, 1, is_returned=True)
    await enqueue(queue, job("new", "b"))
    for other in ("w0", "w2"):
        kept = await claim(queue, other)
        assert ([each.job.id for each in kept.claims], kept.kept_seconds) == (
            ["new"] * (other == "w0"),
            PATIENCE_MS / 1000,
        )
    assert await any_redis.lrange(keys.worker_doorbell(MODEL, "w1"), 0, -1) == [b"1"]
    assert await claim_ids(queue, "w11") == ["j0"], "another worker of the class than the woken one"
    await clock.advance(PATIENCE_MS - 1)
    assert await claim_ids(queue, "w2") == []
    await clock.advance(1)
    late = await claim(queue, "w2", 12)
    assert [each.job.id for each in late.claims] == [f"j{number}" for number in range(1, 12)]
    assert (late.kept_jobs, late.affinity_seconds) == (0, 11 * PATIENCE_MS / 1000)
    # It waits again if it is lost again, but not for a class of which no worker claims jobs.
    for worker in ("w1", "w2"):
        await announce(queue, worker)
    await queue.requeue(jobs[1], 2, is_returned=True)
    assert (await claim(queue, "w2")).kept_jobs == 1
    await announce(queue, "w1", is_draining=True)
    assert await claim_ids(queue, "w2", 9) == ["j1"]


async def test_jobs_of_many_tenants_wait_for_their_class_and_batches_too(
    queue: JobQueue, clock: TestClock
) -> None:
    await announce(queue, "w1")
    await queue.hold("w1", added=[class_digest("1")], ttl_ms=TTL_MS)
    for number in range(30):
        tier = ServiceTier.BATCH if number == 29 else ServiceTier.DEFAULT
        started = chat(f"j{number}", 1, tenant=f"t{number}", service_tier=tier)
        affinity = class_affinity("1") + started.affinity
        await queue.revive(
            msgspec.structs.replace(started, affinity=affinity), weight=1.0, attempt=1
        )
    await enqueue(queue, job("new", "u"))
    result = await claim(queue, "w2", 16)
    assert ([each.job.id for each in result.claims], result.kept_jobs) == (["new"], 30)
    assert (await claim(queue, "w2", 16)).claims == []
    assert len(await claim_ids(queue, "w1", 50)) == 30


async def test_resources_add_to_prefixes(
    queue: JobQueue, clock: TestClock, any_redis: "Redis"
) -> None:
    loaded, other = resource_affinity("adapter:1", 150), resource_affinity("adapter:2", 150)
    await queue.hold("w1", added=[resource_digest("adapter:1")], ttl_ms=TTL_MS)
    await queue.hold("w1", added=digests(1, tokens=100), ttl_ms=TTL_MS)
    await enqueue(queue, chat("plain", 1, resources=other))
    await enqueue(queue, chat("short", 3, tokens=10, resources=loaded))
    await enqueue(queue, chat("both", 1, resources=loaded))
    assert await claim_ids(queue, "w1", 2) == ["both", "short"]
    assert await counters(any_redis) == {"a": 200 - 96 + 10}
    assert await claim_ids(queue, "w1") == ["plain"]
    await enqueue(queue, chat("short-again", 3, tokens=10, resources=loaded))
    assert (await claim(queue, "w2", prefill_us=100)).kept_seconds == 0.03


async def test_what_a_worker_holds_is_bounded_and_ends_with_it(
    queue: JobQueue, any_redis: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    card = WorkerCard(id="w1", model=MODEL, state=WorkerState.READY, engine="e", created=0)
    assert await queue.announce(card, ttl_ms=TTL_MS) == 0
    many = [number.to_bytes(8, "big") for number in range(2_500)]
    assert await queue.hold("w1", added=many, ttl_ms=500) == len(many)
    assert await queue.hold("w1", removed=many[:2_100], added=[b"new"], ttl_ms=500) == 401
    assert await any_redis.hlen(keys.holders(MODEL)) == 401
    assert await queue.announce(card, ttl_ms=TTL_MS) == 401
    assert await any_redis.pttl(keys.held(MODEL, "w1")) > 500
    assert await queue.hold("w1", added=many[:3], starts_over=True, ttl_ms=500) == 3
    monkeypatch.setattr("contract.queue._MOST_HOLDERS", 7)
    await queue.hold("w2", added=many[5:9], ttl_ms=500)
    assert await any_redis.hlen(keys.holders(MODEL)) == 7
    draining = WorkerCard(id="w1", model=MODEL, state=WorkerState.DRAINING, engine="e", created=0)
    assert await queue.announce(draining, ttl_ms=TTL_MS) == 0

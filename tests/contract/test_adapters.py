"""Claims of jobs with adapters: workers have slots for some of them, or none."""

from itertools import count

import msgspec
import pytest
from msgspec import defstruct
from redis.asyncio import Redis

from contract import keys
from contract.messages import AdapterRef, GenerationJob, encode_job
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


async def test_release_without_adapters_cannot_run_their_jobs(queue: JobQueue) -> None:
    decode = msgspec.msgpack.Decoder(defstruct("Older", [("id", str)])).decode
    assert decode(encode_job(job("a1", "a"))).id == "a1"  # type: ignore[attr-defined]
    red = adapted("a1", "a", "red")
    with pytest.raises(msgspec.ValidationError, match="Expected `object`, got `array`"):
        decode(encode_job(red))
    await enqueue(queue, red)
    result = await queue.claim(
        "w1", PLENTY, most_jobs=1, lease_ms=LEASE_MS, adapters=AdapterRoom([], 1)
    )
    assert [each.job for each in result.claims] == [red]


async def test_flood_overtakes_a_job_only_until_those_with_its_slot_end(queue: JobQueue) -> None:
    tokens, sequences = 6, 4
    ids = count()
    running: dict[str, int] = {}

    async def flood() -> None:
        # New tenants start at the lowest counter, that of the waiting one, whose name goes first.
        number = next(ids)
        await enqueue(queue, adapted(f"blue{number}", f"c{number}", "blue"))
        await enqueue(queue, *(job(f"base{number}-{each}", "b") for each in range(sequences)))

    async def step() -> None:
        await flood()
        for job_id in [each for each, left in running.items() if left == 1]:
            assert await queue.finish("w1", LeaseReport(job_id, 1, tokens))
        for job_id in running:
            running[job_id] -= 1
        for job_id in [each for each, left in running.items() if not left]:
            del running[job_id]
        users = [each for each in running if not each.startswith("base")]
        adapters = AdapterRoom(["blue"] if users else [], 0 if users else 1)
        room = PLENTY._replace(sequences=sequences - len(running))
        result = await queue.claim("w1", room, most_jobs=16, lease_ms=LEASE_MS, adapters=adapters)
        running.update((each.job.id, tokens) for each in result.claims)

    await step()
    await enqueue(queue, adapted("red", "a", "red"))
    holders = {each for each in running if each.startswith("blue")}
    assert holders
    steps = 0
    while "red" not in running:
        await step()
        steps += 1
        assert {each for each in running if each.startswith("blue")} <= holders
    assert 1 < steps <= tokens
    assert any(each.startswith("base") for each in running)

"""The sweep: requests of a dead gateway end as lost, with the engine's counts, exactly once."""

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from common import clock
from contract import keys
from contract.outcomes import JobState
from contract.queue import JobQueue, LeaseReport
from gateway.billing.ledger import sweep as sweep_module
from gateway.billing.ledger.drain import FIELD
from gateway.billing.ledger.sweep import PATIENCE_MS, Sweep
from gateway.limits.replies import Admitted, ReservationRequest
from gateway.limits.store import QuotaStore
from gateway.records.limits import Limits, LimitScope, SubjectLimits
from gateway.records.usage_record import Outcome, UsageRecord, decode_usage, encode_usage
from tests.contract.test_queue import LEASE_MS, PLENTY, claim_ids, enqueue, job
from tests.gateway.jobs.conftest import command
from tests.gateway.limits.building import settlement
from tests.support.redis_server import RedisServer
from tests.support.usage import usage_record

MODEL = "m"
STREAM = {"is_streamed": True}
BUCKET = keys.bucket_of("acme")
SUBJECTS = (
    SubjectLimits(LimitScope.KEY, "key_1", Limits(concurrent_requests=1)),
    SubjectLimits(LimitScope.PROJECT, "prj_1", Limits()),
    SubjectLimits(LimitScope.TENANT, "acme", Limits(tokens_per_minute=1_000_000)),
)


def _draft(number: int, **fields: Any) -> UsageRecord:
    nothing = {
        "created_ms": 0,
        "ended_ms": 0,
        "outcome": Outcome.LOST,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "completion_tokens": 0,
        "cost_micros": 0,
        "prompt_price": 1_000_000,
        "cached_price": 0,
        "completion_price": 1_000_000,
    }
    return usage_record(number, **(nothing | fields))


async def _admit(redis: Redis, draft: UsageRecord, *, lease_ms: int = 1) -> int:
    """Reserve for a request as a gateway that then dies; return the time of admission."""
    answer = await QuotaStore(redis).reserve(
        ReservationRequest(
            request_id=draft.request_id,
            tenant_id=draft.tenant_id,
            subjects=SUBJECTS,
            prompt_tokens=100,
            completion_tokens=1000,
            cost_micros=0,
            is_prepaid=False,
            record=encode_usage(draft),
        ),
        lease_ms=lease_ms,
    )
    assert isinstance(answer, Admitted), answer
    await asyncio.sleep(0.01)
    return answer.created_ms


async def _records(redis: Redis) -> list[UsageRecord]:
    entries: Any = await redis.xrange(keys.usage(BUCKET))
    return [decode_usage(fields[FIELD]) for _, fields in entries]


async def _open(redis: Redis) -> int:
    return int(await redis.zcard(keys.open_requests(BUCKET)))


async def _states(queue: JobQueue, *job_ids: str) -> list[JobState]:
    return [receipt.state for receipt in await queue.receipts(job_ids)]


@pytest.mark.parametrize("kind", [{}, {"is_streamed": True, "is_ranked": True}, STREAM], ids=str)
async def test_lost_request_is_settled_with_the_counts_of_its_receipts(
    redis: Redis, kind: dict[str, bool]
) -> None:
    draft, queue = _draft(1, jobs=4, **({"is_streamed": False} | kind)), JobQueue(redis, MODEL)
    admitted_ms = await _admit(redis, draft)
    ids = [f"{draft.request_id}-{index}" for index in range(4)]
    await enqueue(queue, *(job(id_, "acme") for id_ in ids))
    for place, engine in enumerate(("vllm 0.32.0", "vllm 0.31.0", "vllm 0.32.0")):
        claimed = await queue.claim("w1", PLENTY, most_jobs=1, lease_ms=LEASE_MS, engine=engine)
        await queue.finish("w1", LeaseReport(claimed.claims[0].job.id, 1, 5 + place, 10, 4))
    # One of them has sent no token.
    await queue.claim("w1", PLENTY, most_jobs=1, lease_ms=LEASE_MS, engine="")
    await queue.finish("w1", LeaseReport(ids[3], 1, 0, 20, 0))
    sweep = Sweep(redis)
    assert await sweep.run() == 1
    [record] = await _records(redis)
    assert (record.request_id, record.created_ms) == (draft.request_id, admitted_ms)
    assert (record.outcome, record.code) == (Outcome.LOST, "gateway_lost")
    counts = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
    assert counts == (50, 12, 5 + 6 + 7)
    free = (record.free_prompt_tokens, record.free_cached_tokens, record.free_completion_tokens)
    # Clients have received the tokens of a stream, or can resume it.
    assert free == ((20, 0, 0) if kind is STREAM else counts)
    assert record.cost_micros + sweep.lost_micros == 50 - 12 + 5 + 6 + 7
    assert sweep.lost_micros == (20 if kind is STREAM else 56)
    assert record.ended_ms >= admitted_ms
    assert record.engine == "vllm 0.31.0, vllm 0.32.0"
    assert await _states(queue, *ids) == [JobState.ABSENT] * 4, "the receipts are dropped"
    assert await _open(redis) == 0
    assert await sweep.run() == 0


async def test_swept_reservation_frees_its_amounts(redis: Redis) -> None:
    await _admit(redis, _draft(1))
    status = await QuotaStore(redis).status("acme", SUBJECTS)
    assert status[2].completion_tokens_of_minute == 1000
    await Sweep(redis).run()
    status = await QuotaStore(redis).status("acme", SUBJECTS)
    assert status[2].completion_tokens_of_minute == 0
    assert status[0].concurrent_requests == 0


async def test_waiting_jobs_are_cancelled_at_once(redis: Redis) -> None:
    draft, queue = _draft(1), JobQueue(redis, MODEL)
    await _admit(redis, draft)
    await enqueue(queue, job(f"{draft.request_id}-0", "acme"))
    assert await Sweep(redis).run() == 1
    assert await claim_ids(queue) == []
    [record] = await _records(redis)
    assert record.completion_tokens == 0


async def test_running_jobs_are_cancelled_and_waited_for(redis: Redis) -> None:
    draft, queue = _draft(1), JobQueue(redis, MODEL)
    await _admit(redis, draft)
    id_ = f"{draft.request_id}-0"
    await enqueue(queue, job(id_, "acme"))
    await claim_ids(queue)
    assert await Sweep(redis).run() == 0
    assert await _records(redis) == []
    assert await queue.extend("w1", [LeaseReport(id_, 1, 3, 10, 0)], lease_ms=60_000) == [id_]
    await queue.finish("w1", LeaseReport(id_, 1, 7, 10, 0))
    assert await Sweep(redis).run() == 1
    [record] = await _records(redis)
    assert (record.prompt_tokens, record.completion_tokens) == (10, 7)


async def test_living_gateway_keeps_its_requests(redis: Redis) -> None:
    draft, queue = _draft(1), JobQueue(redis, MODEL)
    await _admit(redis, draft)
    await enqueue(queue, job(f"{draft.request_id}-0", "acme"))
    await redis.set(keys.gateway_alive("gw-1"), 1, px=60_000)
    assert await Sweep(redis).run() == 0
    assert await _states(queue, f"{draft.request_id}-0") == [JobState.WAITING]
    await redis.delete(keys.gateway_alive("gw-1"))
    assert await Sweep(redis).run() == 1


async def test_unexpired_lease_is_left_alone(redis: Redis) -> None:
    await _admit(redis, _draft(1), lease_ms=60_000)
    assert await Sweep(redis).run() == 0
    assert await _open(redis) == 1


@pytest.mark.parametrize("gateway_lives", [True, False])
async def test_sweep_settles_after_its_grace_period(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, gateway_lives: bool
) -> None:
    """A worker that never responds, or a living gateway that has lost the request."""
    draft, queue = _draft(1), JobQueue(redis, MODEL)
    await _admit(redis, draft)
    id_ = f"{draft.request_id}-0"
    await enqueue(queue, job(id_, "acme"))
    await claim_ids(queue)
    await queue.extend("w1", [LeaseReport(id_, 1, 3, 10, 2)], lease_ms=60_000)
    if gateway_lives:
        await redis.set(keys.gateway_alive("gw-1"), 1, px=60_000)
    now_ms = clock.now_ms
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms() + PATIENCE_MS - 1000)
    assert await Sweep(redis).run() == 0
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms() + PATIENCE_MS + 1000)
    assert await Sweep(redis).run() == 1
    [record] = await _records(redis)
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (10, 2, 3)
    await queue.finish("w1", LeaseReport(id_, 1, 4, 10, 2))
    assert await _states(queue, id_) == [JobState.ABSENT], "no key is left"


async def test_returning_gateway_and_sweep_settle_once(redis: Redis) -> None:
    finished = usage_record(1, cost_micros=55)
    await _admit(redis, _draft(1))
    settled = await asyncio.gather(
        Sweep(redis).run(), QuotaStore(redis).end(settlement(finished)), Sweep(redis).run()
    )
    assert sum(map(int, settled)) == 1, "the first settle counts"
    records = await _records(redis)
    assert {record.request_id for record in records} == {finished.request_id}
    assert (records[0].outcome is Outcome.FINISHED) == bool(settled[1])
    assert await _open(redis) == 0


@pytest.mark.parametrize("at_once", [1, 500])
async def test_unreadable_draft_delays_no_other_reservation_and_is_put_aside(
    redis: Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(sweep_module, "AT_ONCE", at_once)
    ids = [_draft(number).request_id for number in (1, 2)]
    for number, request_id in enumerate(ids, 1):
        await _admit(redis, _draft(number))
        await command(redis, "HSET", keys.request(BUCKET, request_id), "record", "garbage")
        await command(redis, "DEL", keys.running(BUCKET, "k:key_1"))
    await command(redis, "HSET", keys.request(BUCKET, ids[0]), "request", "garbage")
    await _admit(redis, _draft(3))
    assert await Sweep(redis).run() == 1
    assert not caplog.records, "a later release of the gateway may read them"
    now_ms = clock.now_ms
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms() + PATIENCE_MS + 1000)
    assert await Sweep(redis).run() == 1
    assert caplog.text.count("cannot be read") == 1
    assert await redis.hget(keys.unreadable_usage(BUCKET), ids[1]) == b"garbage"
    assert await _open(redis) == 1, "the one that cannot be released"
    status = await QuotaStore(redis).status("acme", SUBJECTS)
    assert status[2].completion_tokens_of_minute == 1000


@pytest.mark.parametrize("at_once", [1, 500])
async def test_failed_settlement_does_not_delay_others(
    redis: Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(sweep_module, "AT_ONCE", at_once)
    await _admit(redis, _draft(1))
    await redis.set(keys.job(MODEL, f"{_draft(1).request_id}-0"), "of another type")
    await command(redis, "DEL", keys.running(BUCKET, "k:key_1"))
    await _admit(redis, _draft(2))
    assert await Sweep(redis).run() == 1
    assert [record.request_id for record in await _records(redis)] == [_draft(2).request_id]
    assert "cannot be settled" in caplog.text


async def test_sweep_works_on_every_redis(any_redis_server: RedisServer) -> None:
    client = Redis.from_url(any_redis_server.url)
    await client.flushall()
    draft, queue = _draft(1), JobQueue(client, MODEL)
    await _admit(client, draft)
    await enqueue(queue, job(f"{draft.request_id}-0", "acme"))
    assert await Sweep(client).run() == 1
    assert [record.request_id for record in await _records(client)] == [draft.request_id]
    await client.aclose()

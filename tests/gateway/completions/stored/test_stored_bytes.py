"""Bytes in Redis of running responses: counted, limited, and removed from reply streams."""

import asyncio
import random
from typing import Any

import pytest
from redis.asyncio import Redis

from contract import keys
from contract.messages import TokenLogprob
from contract.outcomes import FailureCode
from contract.queue import JobClaim
from gateway.completions.stored import owned
from gateway.completions.stored.store import bytes_of_head
from gateway.limits.replies import RequestState
from gateway.limits.stored_bytes import Storage, allocated
from gateway.records.limits import Limits, LimitScope, SubjectLimits
from tests.gateway.completions.stored.house import TENANT, House, Reader, begun, settled, state_is
from tests.gateway.conftest import eventually
from tests.support.fake_worker import FakeWorker
from tests.support.patience import PATIENCE_SECONDS

MOST = 300_000


async def flood(worker: FakeWorker, claim: JobClaim, size: int) -> int:
    """Send tokens with log-probabilities of at least so many bytes. Return how many tokens."""
    draw, tokens = random.Random(size), 0
    while size > 0:
        # Compression gains little.
        scores = [
            TokenLogprob(draw.randbytes(12).decode("latin-1"), -draw.random(), number)
            for number in range(50)
        ]
        delta = worker.next_delta(claim, "x", logprobs=scores)
        await worker.send(claim.job.gateway, deltas=[delta])
        size, tokens = size - len(delta.logprobs), tokens + 1
    return tokens


@pytest.mark.parametrize("is_background", [False, True], ids=["stream", "background"])
async def test_output_counts_while_it_runs_and_ends_at_the_limit(
    first: House, worker: FakeWorker, redis: "Redis", *, is_background: bool
) -> None:
    limits = Limits(stored_bytes=MOST)
    subjects = [SubjectLimits(LimitScope.TENANT, TENANT, limits)]
    storage: Storage = first.settlements.storage
    request = await first.submit(limits=limits, max_tokens=10_000, is_background=is_background)
    reader = Reader(request.generation)
    if is_background:
        first.responses.of(request.settlement).leave()
    claim = await worker.claim_one()
    tokens = await flood(worker, claim, MOST // 2)

    async def are_counted() -> bool:
        (used,) = await storage.used(TENANT, subjects)
        return used > MOST // 4

    await eventually(are_counted, what="the bytes of a running response")
    assert not request.settlement.has_ended
    tokens += await flood(worker, claim, MOST)
    if not is_background:
        await reader.to_the_end()
        assert reader.failure is not None
        assert reader.failure.code is FailureCode.STORED_BYTES
        assert f"{MOST} stored bytes" in reader.failure.message
        first.responses.of(request.settlement).fail(RuntimeError())
    control = keys.control(worker.queue.model, worker.name)
    await eventually(lambda: redis.llen(control), what="the cancellation being sent")
    await worker.drop(claim, tokens=tokens)
    ((outcome, _, charged),) = await settled(redis, request.id)
    assert (outcome, charged) == ("failed", tokens)
    await state_is(first, request.id, RequestState.FAILED)

    async def is_whole() -> bool:
        (used,) = await storage.used(TENANT, subjects)
        head: Any = await redis.hget(keys.content(request.id), "head")
        entries = await redis.lrange(keys.journal(request.id), 0, -1)
        return used == bytes_of_head(head) + allocated(map(len, entries))

    await eventually(is_whole, what="the bytes of the stored response")


async def test_replies_in_all_journals_are_removed_and_a_takeover_loses_none(
    first: House,
    second: House,
    worker: FakeWorker,
    redis: "Redis",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owned, "TRIM_BYTES", 100_000)
    quiet, claim = await begun(first, worker, "a", "b")
    plain = await first.submit(is_kept=False, max_tokens=10_000)
    tokens = 0
    loud = await worker.claim_one()

    async def length() -> Any:
        return await redis.memory_usage(keys.replies("gw1"), samples=0)

    async with asyncio.timeout(PATIENCE_SECONDS):
        while tokens < 1000 or await length() > 500_000:
            tokens += await flood(worker, loud, 100_000)
    del plain
    await worker.say(claim, "c")
    await eventually(lambda: quiet.generation.received_tokens[0] == 3, what="the last token")

    await first.kill()
    reader = Reader((await second.attach(quiet.id)).generation)
    await reader.until_text("abc")
    again = await worker.claim_one()
    assert again.job.resumption is not None
    await worker.conclude(again, "d")
    assert (await reader.to_the_end()).text == "abcd"

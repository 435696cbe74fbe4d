"""A stream reserves its next tokens while it generates them, and ends at its limits."""

import pytest
from redis.asyncio import Redis

from contract.outcomes import FailureCode
from gateway.completions import settlement
from gateway.records.limits import Limits, LimitScope, SubjectLimits
from tests.gateway.completions.stored.house import (
    PROMPT,
    TENANT,
    House,
    Reader,
    Submitted,
    begun,
    settled,
)
from tests.gateway.conftest import eventually
from tests.support.fake_worker import FakeWorker

MOST = 100
SUBJECT = SubjectLimits(LimitScope.TENANT, TENANT, Limits())


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settlement, "SLICE_TOKENS", 4)
    monkeypatch.setattr(settlement, "SLICE_SECONDS", 0.02)


async def reserves(house: House, request: Submitted, tokens: int) -> None:
    async def is_so() -> bool:
        [status] = await house.reservations._store.status(TENANT, [SUBJECT])
        return status.completion_tokens_of_minute == tokens

    await eventually(is_so, what=f"{tokens} tokens being reserved for {request.id}")


async def test_stream_reserves_what_it_generates_next(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    limits = Limits(completion_tokens_per_minute=12)
    request, claim = await begun(first, worker, max_tokens=MOST, is_sliced=True, limits=limits)
    await reserves(first, request, 4)
    await worker.say(claim, *"bc")
    await reserves(first, request, 7)
    # The gateway that takes over continues, although it lacks the reserved amount.
    await first.kill()
    reader = await Reader((await second.attach(request.id)).generation).until_text("abc")
    claim = await worker.claim_one()
    await worker.say(claim, *"def")
    await reserves(second, request, 10)
    await worker.say(claim, *"ghi")
    await reader.to_the_end()
    assert reader.failure is not None
    assert reader.failure.code is FailureCode.RATE_LIMITED
    assert "completion tokens per minute" in reader.failure.message
    assert "Please try again in " in reader.failure.message
    await worker.drop(claim, tokens=9)
    assert await settled(redis, request.id) == [("failed", len(PROMPT), 9)]

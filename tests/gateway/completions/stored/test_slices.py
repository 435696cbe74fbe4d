"""A stream reserves its next tokens while it generates them, and ends at its limits."""

import asyncio

import pytest
from redis.asyncio import Redis

from contract.outcomes import FailureCode
from gateway.completions import settlement
from gateway.completions.settlement import Slices
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
from tests.support.patience import PATIENCE_SECONDS

MOST = 100
SUBJECT = SubjectLimits(LimitScope.TENANT, TENANT, Limits())


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settlement, "SLICE_TOKENS", 4)
    monkeypatch.setattr(settlement, "SLICE_SECONDS", 0.02)


async def reserves(house: House, request: Submitted, *tokens: int) -> None:
    """Wait until a request has reserved one of these numbers of tokens."""

    async def is_so() -> bool:
        [status] = await house.reservations._store.status(TENANT, [SUBJECT])
        return status.completion_tokens_of_minute in tokens

    await eventually(is_so, what=f"{tokens} tokens being reserved for {request.id}")


async def test_stream_uses_what_is_reserved_before_a_limit_ends_it(
    first: House, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = asyncio.Event()

    def are_used(slices: Slices, received: int) -> bool:
        refused.set()
        return slices_are_used(slices, received)

    slices_are_used = Slices.are_used
    monkeypatch.setattr(Slices, "are_used", are_used)
    limits = Limits(completion_tokens_per_minute=9)
    request, claim = await begun(first, worker, max_tokens=MOST, is_sliced=True, limits=limits)
    await reserves(first, request, 4)
    await worker.say(claim, *"bc")
    await reserves(first, request, 7)
    # The limit rejects tokens 8 to 10. The stream runs up to the seventh token.
    await worker.say(claim, *"def")
    for _ in range(2):
        refused.clear()
        await asyncio.wait_for(refused.wait(), PATIENCE_SECONDS)
    await worker.say(claim, "g")
    reader = await Reader(request.generation).to_the_end()
    assert reader.text == "bcdefg"
    assert reader.failure is not None
    assert reader.failure.code is FailureCode.RATE_LIMITED
    assert "completion tokens per minute" in reader.failure.message
    assert "Please try again in " in reader.failure.message


async def test_gateway_that_takes_over_continues_what_is_reserved(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    limits = Limits(completion_tokens_per_minute=12)
    request, claim = await begun(first, worker, max_tokens=MOST, is_sliced=True, limits=limits)
    await worker.say(claim, *"bc")
    await reserves(first, request, 7)
    await first.kill()
    reader = await Reader((await second.attach(request.id)).generation).until_text("abc")
    claim = await worker.claim_one()
    # The limit is exceeded unless the next gateway only adds what is not reserved yet.
    await worker.say(claim, *"def")
    await reserves(second, request, 10)
    await worker.say(claim, *"ghij")
    await reader.to_the_end()
    assert reader.failure is not None
    await worker.drop(claim, tokens=10)
    assert await settled(redis, request.id) == [("failed", len(PROMPT), 10)]

"""Delivered tokens are charged, however their request ends."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from random import Random
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import AsyncMock

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from common.not_none import not_none
from common.tasks import end_task
from contract.messages import JobFailed
from contract.outcomes import FailureCode
from contract.tier import ServiceTier
from gateway.batches.line_runner import BatchState, Line, LineRun, LineRunner
from gateway.completions.admission.idempotency import EarlierResponses
from gateway.completions.admission.submit import Submission
from gateway.completions.rendering.failures import to_api_error
from gateway.completions.settlement import Ending
from gateway.completions.stored.store import StoredResponse
from gateway.dialects.endpoint import COMPLETIONS
from gateway.limits.store import QuotaStore
from gateway.platform.redis_client import MeasuredConnection
from gateway.platform.settings import Settings
from gateway.records.batches import Batch
from gateway.records.errors import (
    ApiError,
    InternalError,
    RequestCancelledError,
    SlowReaderError,
    StoreUnavailableError,
    queue_unavailable,
)
from gateway.records.times import utc_now
from gateway.records.usage_record import Outcome, UsageRecord
from tests.gateway.completions.stored.house import (
    COMPLETION_PRICE,
    MODEL,
    PROMPT,
    TENANT,
    House,
    Submitted,
    settled,
    settled_records,
    usage_records,
)
from tests.gateway.conftest import eventually
from tests.support.fake_worker import FakeWorker

FINISHED, BEGUN = 4, 2
"""Tokens of a prompt that finishes, and of one that does not."""
COUNTED = 5
"""Tokens of the latter that its engine has sampled when it receives the cancellation."""

OURS: Final = frozenset(FailureCode) - {
    FailureCode.INVALID_REQUEST,
    FailureCode.DEADLINE_EXCEEDED,
    FailureCode.STORED_BYTES,
    FailureCode.RATE_LIMITED,
    FailureCode.OUT_OF_QUOTA,
    # These end no request: another gateway settles it, its client has ended it, or it is settled.
    FailureCode.TAKEN_OVER,
    FailureCode.OUTPUT_LOST,
    FailureCode.CANCELLED,
}

End = Callable[[House, Submitted], None]


def failing(error: ApiError | BaseException) -> End:
    """End a request as its reader does at an error."""
    return lambda house, request: house.responses.of(request.settlement).fail(error)


def cancel(house: House, request: Submitted) -> None:
    """End a request as its cancellation does."""
    settlement = request.settlement
    owned = house.responses._owned.of(settlement)
    (settlement if owned is None else owned).end(Ending(Outcome.CANCELLED, "cancelled"))


def leave(house: House, request: Submitted) -> None:
    """End a request as its client does when it disconnects."""
    house.responses.of(request.settlement).leave()


THEIRS: Mapping[str, End] = {
    "rejected": failing(to_api_error(JobFailed(0, 0, FailureCode.INVALID_REQUEST, ""))),
    "timed out": failing(to_api_error(JobFailed(0, 0, FailureCode.DEADLINE_EXCEEDED, ""))),
    "stored bytes": failing(to_api_error(JobFailed(0, 0, FailureCode.STORED_BYTES, ""))),
    "rate limited": failing(to_api_error(JobFailed(0, 0, FailureCode.RATE_LIMITED, ""))),
    "out of quota": failing(to_api_error(JobFailed(0, 0, FailureCode.OUT_OF_QUOTA, ""))),
    "slow reader": failing(SlowReaderError("")),
    "left": leave,
    "cancelled": cancel,
}
"""Ends that a client can cause."""
FAILURES: Mapping[str, End] = {
    **{code: failing(to_api_error(JobFailed(0, 0, code, ""))) for code in sorted(OURS)},
    "a bug": failing(RuntimeError()),
    "an internal error": failing(InternalError()),
}


async def used(
    house: House, worker: FakeWorker, redis: "Redis", end: End, *, stream: bool, is_kept: bool
) -> UsageRecord:
    """Return the record of three prompts: one finished, one running, one waiting."""
    request = await house.submit(prompts=3, is_kept=is_kept, stream=stream)
    finished, begun = await worker.claim(2)
    await worker.say(begun, *"ab")
    await worker.conclude(finished, *"abcd")
    generation = request.generation

    async def has_come() -> bool:
        received = sum(generation.received_tokens.values())
        return len(generation.finished) == 1 and received == FINISHED + BEGUN

    await eventually(has_come, what="the replies")
    end(house, request)
    await worker.drop(begun, tokens=COUNTED, cached=1)

    async def is_settled() -> bool:
        return request.id in await usage_records(redis)

    await eventually(is_settled, what="the settlement")
    return (await usage_records(redis))[request.id]


def paid(record: UsageRecord) -> tuple[int, int]:
    """Return the prompt and completion tokens that the tenant pays; check the cost."""
    prompt = record.prompt_tokens - record.free_prompt_tokens
    completion = record.completion_tokens - record.free_completion_tokens
    assert record.cost_micros == (prompt + completion) * COMPLETION_PRICE // 1_000_000
    assert 0 <= record.free_cached_tokens <= record.cached_tokens
    assert record.completion_tokens == FINISHED + COUNTED
    assert record.prompt_tokens == 2 * len(PROMPT)
    return prompt, completion


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("is_kept", [False, True], ids=["", "kept"])
async def test_no_end_caused_by_a_client_is_free(
    first: House, worker: FakeWorker, redis: "Redis", *, stream: bool, is_kept: bool
) -> None:
    for name, end in THEIRS.items():
        record = await used(first, worker, redis, end, stream=stream, is_kept=is_kept)
        assert (name, paid(record)) == (name, (2 * len(PROMPT), FINISHED + COUNTED))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("is_kept", [False, True], ids=["", "kept"])
async def test_only_delivered_tokens_are_charged_after_a_server_failure(
    first: House, worker: FakeWorker, redis: "Redis", *, stream: bool, is_kept: bool
) -> None:
    delivered = (2 * len(PROMPT), FINISHED + BEGUN) if stream or is_kept else (0, 0)
    for name, end in FAILURES.items():
        record = await used(first, worker, redis, end, stream=stream, is_kept=is_kept)
        assert (name, paid(record)) == (name, delivered)


def _submission(request: Submitted, stored: StoredResponse) -> Submission:
    checked: Any = SimpleNamespace(card=SimpleNamespace(model=MODEL))
    return Submission(checked, request.completion, request.generation, request.settlement, stored)


@pytest.mark.parametrize("is_continued", [False, True], ids=["begun here", "continued"])
async def test_line_of_a_batch_that_is_cancelled_while_it_ends_is_delivered_if_it_is_paid(
    first: House, second: House, worker: FakeWorker, redis: "Redis", *, is_continued: bool
) -> None:
    random, delivered = Random(37), set[str]()
    names = dict.fromkeys(Batch.__dataclass_fields__)
    names |= {"endpoint": "/v1/completions", "expires_at": utc_now()}
    for number in range(40):
        request = await first.submit(line=f"batch_1:{number}", stream=False, is_background=True)
        claim = await worker.claim_one()
        batch: Any = {**names, "id": "batch_1", "tenant_id": TENANT}
        line = Line(BatchState(Batch(**batch)), number, b'{"custom_id":"a"}')
        stored: Any = await first.find(request.id)
        house = second if is_continued else first
        services: Any = [*[None] * 7, house.responses, None]
        runner = LineRunner(*services)
        if is_continued:
            first.responses.of(request.settlement).leave()
            run = runner._continue(line, stored)
        else:
            run = runner._follow(line, _submission(request, stored))
        running = asyncio.create_task(run)
        stop = line.state.stop.set
        asyncio.get_running_loop().call_later(random.uniform(0.0, 0.02), stop)
        await asyncio.sleep(random.uniform(0.0, 0.02))
        ending = asyncio.create_task(worker.conclude(claim, "a"))
        with suppress(RequestCancelledError):
            assert b"cmpl-" in (await running).result.content
            delivered.add(request.id)
        await ending
    records = await settled_records(redis, 40)
    assert delivered == {key for key, record in records.items() if record.cost_micros}


async def test_line_that_runs_again_is_paid_once_although_its_first_gateway_dies(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    batch: Any = {**dict.fromkeys(Batch.__dataclass_fields__), "endpoint": COMPLETIONS.path}
    expires_at = utc_now() + timedelta(days=7)
    batch |= {"id": "batch_1", "tenant_id": TENANT, "expires_at": expires_at}
    line = Line(BatchState(Batch(**batch)), 1, b'{"custom_id":"a"}')
    # The key of the batch may not use the model any more.
    principal: Any = SimpleNamespace(allows_model=lambda _: False, project_id=None)
    begun = asyncio.Event()

    async def run(house: House, error: ApiError | None = None) -> LineRun | None:
        requests = QuotaStore(MeasuredConnection(redis))
        earlier = EarlierResponses(Settings(), requests, house.responses, house.reservations)
        services: Any = [*[None] * 6, earlier, house.responses, house.catalogue]
        runner: Any = LineRunner(*services)

        async def submit(_call: object, _endpoint: object, request_id: str, _key: object) -> Any:
            request = await house.submit(
                request_id=request_id, line=line.id, stream=False, is_background=True
            )
            if error is not None:
                # A worker has the job, but the gateway does not know that it is in the queue.
                await begun.wait()
                house.responses.of(request.settlement).fail(error)
                raise error
            return _submission(request, await house.find(request.id))

        runner._call = AsyncMock(return_value=SimpleNamespace(principal=principal, line=line))
        runner._submit = submit
        found: LineRun | None = await runner.run(line, principal, ServiceTier.BATCH)
        return found

    async def serve() -> None:
        while True:
            await worker.conclude(await worker.claim_one(), "a")

    failing = asyncio.create_task(run(first, queue_unavailable()))
    await worker.claim_one()
    begun.set()
    with pytest.raises(StoreUnavailableError):
        await failing
    # The key outlives its request by no moment, and the request the key by none.
    (entry,), (request,) = await redis.keys("*:idempotency:*"), await redis.keys("*:request:*")
    assert await redis.ttl(entry) == await redis.ttl(request)
    await first.kill()
    serving = asyncio.create_task(serve())
    delivered = not_none(not_none(await run(second)).head).request_id
    await second.responses.take_over_background()
    await eventually(lambda: not second.responses._owned.by_id, what="the ends")
    await end_task(serving)
    records = await settled_records(redis, 1)
    assert [key for key, record in records.items() if record.cost_micros] == [delivered]


async def test_line_of_a_batch_that_runs_again_has_no_record(
    first: House, worker: FakeWorker, redis: "Redis"
) -> None:
    ends = {
        "again": failing(to_api_error(JobFailed(0, 0, FailureCode.ENGINE_ERROR, ""))),
        "without Redis": failing(RedisConnectionError()),
        "abandoned": leave,
        "never": failing(to_api_error(JobFailed(0, 0, FailureCode.INVALID_REQUEST, ""))),
    }
    requests = {name: await first.submit(line=f"batch_1:{name}") for name in ends}
    for claim in await worker.claim(len(requests)):
        await worker.say(claim, "a")
        await worker.drop(claim, tokens=1, cached=0)
    for name, end in ends.items():
        end(first, requests[name])
    # What it has generated is free, because its result is not whole.
    assert await settled(redis, requests["never"].id) == [("failed", 3, 1)]
    (record,) = (await usage_records(redis)).values()
    assert record.cost_micros == 0

"""Chunks of long prompts: what a gateway writes for a job, and what is left if they are gone."""

from typing import Any

import pytest
from prometheus_client import REGISTRY
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from common.not_none import not_none
from contract import keys
from contract.messages import ReturnReason
from contract.prompts import CHUNK_TOKENS
from contract.queue import JobClaim
from gateway.completions.stored.store import DEADLINE_GRACE_MS
from gateway.platform.settings import Settings
from gateway.records.limits import Limits, LimitScope, SubjectLimits
from tests.gateway.completions.stored.conftest import OpenHouse
from tests.gateway.completions.stored.house import MODEL, TENANT, House, Reader, begun
from tests.gateway.conftest import eventually
from tests.support.cases import all_cases
from tests.support.fake_worker import FakeWorker

PROMPT = [at % 2_000 for at in range(3 * CHUNK_TOKENS + 7)]
ALL = "*:chunk:*"


def counts() -> list[float]:
    """Return how many chunks were kept and written so far."""
    name, outcomes = "sluice_gateway_prompt_chunks_total", ("kept", "written")
    return [REGISTRY.get_sample_value(name, {"outcome": each}) or 0.0 for each in outcomes]


async def whole(worker: FakeWorker, claim: JobClaim) -> JobClaim | None:
    """Return a claim with the whole prompt of its job; None if that is lost."""
    job, _ = await worker.queue.with_prompt(claim.job)
    return None if job is None else claim._replace(job=job)


async def test_turn_writes_only_what_is_new(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    longer = PROMPT + list(range(CHUNK_TOKENS))
    for house, prompt, kept, written in (
        (first, PROMPT, 0, 3),
        # What a gateway used a moment ago needs no command.
        (first, [*PROMPT, 5], 0, 0),
        (first, longer, 0, 1),
        (second, longer, 4, 0),
        (second, [9, *PROMPT], 0, 3),
    ):
        before = counts()
        await house.submit(prompt=prompt)
        assert counts() == [before[0] + kept, before[1] + written]
        claim = await worker.claim_one()
        assert len(claim.job.prompt_token_ids) == len(prompt) % CHUNK_TOKENS
        claim = not_none(await whole(worker, claim))
        assert claim.job.prompt_token_ids.tolist() == prompt
        await worker.conclude(claim, "a")
    longest = Settings().request_timeout + Settings().answer_retention
    for key in await redis.keys(ALL):
        assert await redis.pttl(key) > longest.total_seconds() * 1000 + DEADLINE_GRACE_MS


async def test_chunks_count_as_stored_bytes_though_no_job_is_enqueued(
    first: House, redis: "Redis", worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(stored_bytes=10 * 4 * CHUNK_TOKENS)
    subjects = (SubjectLimits(LimitScope.TENANT, TENANT, limits),)

    async def refuse(*_: object, **__: object) -> None:
        raise ConnectionResetError

    with monkeypatch.context() as patch:
        patch.setattr(first.dispatcher, "enqueue", refuse)
        for _ in range(2):
            with pytest.raises(ConnectionResetError):
                await first.submit(prompt=PROMPT, limits=limits, is_kept=False)
    (used,) = await first.settlements.storage.used(TENANT, subjects)
    assert 3 * 4 * CHUNK_TOKENS < used < 4 * 4 * CHUNK_TOKENS
    # Chunks leave half of a limit to what requests need.
    await first.submit(prompt=[9, *PROMPT], limits=limits, is_kept=False)
    assert not (await worker.claim_one()).job.chunks
    assert len(await redis.keys(ALL)) == 3


@all_cases("reason", ["refused", "filling", "late", "worker", "short"])
async def test_job_without_chunks_has_its_whole_prompt(
    first: House, redis: "Redis", worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    prompt = PROMPT[:CHUNK_TOKENS] if reason == "short" else PROMPT
    if reason == "worker":
        await worker.announce()
        await first.catalogue.refresh()
    elif reason == "refused":

        async def refuse(*_: object, **__: object) -> None:
            raise OutOfMemoryError

        monkeypatch.setattr(first.catalogue.queue(MODEL), "write_chunks", refuse)
    elif reason == "filling":
        memory: Any = await redis.info("memory")
        await redis.config_set("maxmemory", memory["used_memory"] * 3 // 2)
    try:
        await first.submit(prompt=prompt, deadline_seconds=86_400 if reason == "late" else 60)
    finally:
        await redis.config_set("maxmemory", 0)
    claim = await worker.claim_one()
    assert not claim.job.chunks
    assert claim.job.prompt_token_ids.tolist() == prompt
    assert not await redis.keys(ALL)


async def test_returned_job_is_sent_whole_and_the_next_turn_writes_again(
    first: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request = await first.submit(prompt=PROMPT)
    claim = await worker.claim_one()
    lost = await redis.keys(ALL)
    await redis.delete(*lost)
    assert await whole(worker, claim) is None
    await worker.give_back(claim, ReturnReason.PROMPT_LOST)
    again = await worker.claim_one()
    assert (again.attempt, again.job.chunks, again.job.is_suspect) == (2, b"", False)
    assert again.job.prompt_token_ids.tolist() == PROMPT
    await worker.conclude(again, "a")
    reader = await Reader(request.generation).to_the_end()
    assert (reader.text, reader.failure) == ("a", None)
    await first.submit(prompt=PROMPT)
    assert (await worker.claim_one()).job.chunks
    assert set(await redis.keys(ALL)) == set(lost)


async def test_another_gateway_resumes_a_stream_with_its_whole_prompt(
    open_house: OpenHouse, first: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request, claim = await begun(first, worker, prompt=PROMPT)
    head = await redis.hget(keys.content(request.id), "head")
    assert head is not None
    assert len(head) < 2_000
    await first.kill()
    second = await open_house("gw2")
    reader = await second.attach(request.id)
    await worker.lose(claim, tokens=1)
    again = await worker.claim_one()
    assert again.job.prompt_token_ids.tolist() == PROMPT
    assert again.job.resumption is not None
    await worker.conclude(again, "b")
    await Reader(reader.generation).until_text("ab")
    await reader.aclose()


async def test_stream_whose_prompt_is_lost_is_gone_for_other_gateways_only(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request, claim = await begun(first, worker, prompt=PROMPT)
    await redis.delete(*await redis.keys(ALL))
    assert await second.responses.find(request.id, tenant_id=TENANT) is None
    await worker.conclude(claim, "b")
    reader = await Reader(request.generation).to_the_end()
    assert (reader.text, reader.failure) == ("b", None)


async def test_stream_is_stored_again_whole_after_redis_lost_it(
    first: House, second: House, worker: FakeWorker, redis: "Redis"
) -> None:
    request, claim = await begun(first, worker, prompt=PROMPT)
    await redis.delete(*await redis.keys(ALL), keys.content(request.id), keys.journal(request.id))
    await worker.say(claim, "b")

    async def is_stored() -> bool:
        return await second.responses.find(request.id, tenant_id=TENANT) is not None

    await eventually(is_stored, what="the response")
    found = await second.find(request.id)
    assert found.head.jobs[0].prompt_token_ids.tolist() == PROMPT

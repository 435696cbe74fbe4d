"""Jobs that are preempted again and again on vLLM, and their undisturbed outputs."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from contract.messages import GenerationJob, ReturnReason, decode_logprobs
from contract.queue import RequeueResult
from contract.sampling import SamplingSpec
from contract.tier import ServiceTier
from tests.support.redis_server import RedisServer
from tests.worker.conftest import Gateway, connect, make_job, resumed, running_engine
from tests.worker.real_engine import EXACT, MARKS, EngineSlot, generation_of
from worker.engine.vllm.engine import VllmEngine
from worker.execution import sequence

pytestmark = MARKS

MOST_SEQUENCES = 4
GREEDY = SamplingSpec(seed=0, temperature=0.0, ignore_eos=True)
SEEDED = SamplingSpec(seed=5, ignore_eos=True)
LINES: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": GREEDY},
    "seeded": {"sampling": SEEDED},
    "n": {"sampling": SEEDED, "n": 2},
    "logprobs and stop": {"sampling": GREEDY, "logprobs": 2, "stop": ["zzzz"]},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(engine_slot: EngineSlot) -> VllmEngine:
    return await engine_slot.engine(**EXACT)


async def test_first_token_waits_for_no_batch_job(engine: VllmEngine) -> None:
    jobs = [make_job(max_tokens=tokens, sampling=GREEDY) for tokens in (900, 1)]
    [line], [request] = (generation_of(engine, job).requests() for job in jobs)

    async def sampled() -> list[str]:
        """Return the sequences of the next step that has outputs of them."""
        ids: list[str] = []
        while not ids:
            # A sequence that an earlier test aborted may have one more output.
            reported = [output.sequence_id for output in (await engine.step()).outputs]
            ids = [each for each in reported if each in (line.id, request.id)]
        return ids

    await engine.submit([replace(line, is_preemptible=True)])
    for _ in range(3):
        assert await sampled() == [line.id]
    await engine.submit([request])
    while (together := await sampled()) == [line.id]:
        pass
    assert together == [request.id]
    await engine.abort([line.id])


async def interrupt(gateway: Gateway, lines: list[GenerationJob]) -> int:
    """Send requests until all lines have finished, and requeue preempted lines."""
    handles, requeued = {line.handle for line in lines}, set[tuple[int, int]]()
    request = make_job(max_tokens=4, sampling=GREEDY)
    try:
        async with asyncio.timeout(120):
            while not handles <= gateway.ended_handles():
                request = make_job(max_tokens=4, sampling=GREEDY, tenant="other")
                await gateway.enqueue(request)
                while request.handle not in gateway.ended_handles():
                    await gateway.read()
                    for line in lines:
                        for back in gateway.returned(line):
                            if (back.handle, back.attempt) not in requeued:
                                requeued.add((back.handle, back.attempt))
                                assert back.reason is ReturnReason.PREEMPTED
                                again = resumed(gateway, line)
                                result = await gateway.queue.requeue(
                                    again, back.attempt, is_returned=True
                                )
                                assert result is RequeueResult.REQUEUED
    except TimeoutError:
        waiting = {*handles, request.handle} - gateway.ended_handles()
        pytest.fail(f"no end of {waiting} after {requeued}: {gateway.frames[-8:]}")
    return len(requeued)


@pytest.mark.parametrize("tier", [ServiceTier.BATCH, ServiceTier.DEFAULT], ids=["batch", "tenant"])
async def test_preempted_jobs_equal_their_undisturbed_outputs(
    redis_server: RedisServer,
    engine: VllmEngine,
    monkeypatch: pytest.MonkeyPatch,
    tier: ServiceTier,
) -> None:
    monkeypatch.setattr(sequence, "SAFE_TOKENS", 4)
    monkeypatch.setattr(engine, "info", replace(engine.info, max_sequences=MOST_SEQUENCES))
    alike = [make_job(max_tokens=80, **fields) for fields in LINES.values()]
    lines = [
        msgspec.structs.replace(job, id=f"{job.id}-b", handle=10**6 + job.handle, service_tier=tier)
        for job in alike
    ]
    async with connect(redis_server) as redis:
        # A large batch job that an earlier test left would wait for an empty engine.
        await redis.flushall()
        async with running_engine(
            redis_server, engine, gather_seconds=0.0, stall_seconds=60.0, preempted_share=100.0
        ):
            gateway = Gateway(redis)
            await gateway.live()
            await gateway.enqueue(*alike)
            await gateway.finished(*alike)
            await gateway.enqueue(*lines)
            assert await interrupt(gateway, lines) > 2
    for line, job in zip(lines, alike, strict=True):
        for choice in range(job.n):
            assert gateway.token_ids(line, choice) == gateway.token_ids(job, choice)
            assert gateway.text(line, choice) == gateway.text(job, choice)
        logprobs = [
            [
                entry.token
                for delta in gateway.deltas(each)
                for entry in decode_logprobs(delta.logprobs)
            ]
            for each in (line, job)
        ]
        assert logprobs[0] == logprobs[1]

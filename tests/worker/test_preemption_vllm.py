"""Jobs that are preempted again and again on vLLM, and their undisturbed outputs."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from contract.messages import GenerationJob, JobFinished, ReturnReason, decode_logprobs
from contract.queue import RequeueResult
from contract.sampling import SamplingSpec
from contract.tier import ServiceTier
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer
from tests.worker.conftest import Gateway, connect, make_job, resumed, running_engine
from tests.worker.real_engine import EXACT, MARKS, EngineSlot, generation_of
from tests.worker.test_chat_resumption_vllm import JOBS, answers_of
from tests.worker.test_resumption_vllm import CASES, PROMPT
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
    "best_of": {"sampling": SEEDED, "n": 2, "best_of": 3},
    "logprobs and stop": {"sampling": GREEDY, "logprobs": 2, "stop": ["zzzz"]},
}
FEW = (
    *("frequency", "json", "chain", "greedy dry", "mirostat 2", "reasoning ended by a budget"),
    *("reasoning of several, gathered", "named call, stopped"),
)
"""Cases and chats that the default run preempts, too."""


def lines_of(*, is_long: bool) -> list[GenerationJob]:
    """Return a job of each kind."""
    cases = {
        name: make_job(
            prompt_token_ids=PROMPT,
            max_tokens=case.max_tokens,
            sampling=case.sampling,
            grammar=case.grammar,
            logprobs=case.logprobs,
        )
        for name, case in CASES.items()
    }
    others = {**cases, **JOBS}
    return [
        *(make_job(**{"max_tokens": 80, **fields}) for fields in LINES.values()),
        *(job for name, job in others.items() if is_long or name in FEW),
    ]


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


async def test_first_token_waits_for_no_prompts_of_another_tenant(engine: VllmEngine) -> None:
    many = [
        make_job(
            prompt_token_ids=[3] * 900,
            max_tokens=1,
            sampling=GREEDY,
            tenant="many",
            cache_salt=f"a client's key {number}",
        )
        for number in range(30)
    ]
    jobs = [*many, make_job(max_tokens=1, sampling=GREEDY, tenant="other")]
    requests = [generation_of(engine, job).requests() for job in jobs]
    for each in requests:
        await engine.submit(each)
    ended, names = list[str](), {each.id for [each] in requests}
    while len(ended) < len(jobs):
        outputs = (await engine.step()).outputs
        ended += [each.sequence_id for each in outputs if each.sequence_id in names]
    [last] = requests[-1]
    assert ended.index(last.id) < len(many) / 2


async def interrupt(
    gateway: Gateway, lines: list[GenerationJob], *, requests: int
) -> set[tuple[int, int]]:
    """Send some requests at once until all lines have finished, and requeue preempted lines.

    Return the handles and attempts of these.
    """
    handles, requeued = {line.handle for line in lines}, set[tuple[int, int]]()
    waiting = set[int]()
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not handles <= gateway.ended_handles():
                fillers = [
                    make_job(max_tokens=4, sampling=GREEDY, tenant="other") for _ in range(requests)
                ]
                await gateway.enqueue(*fillers, weight=100.0)
                waiting = {filler.handle for filler in fillers}
                while not waiting <= gateway.ended_handles():
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
        waiting = {*handles, *waiting} - gateway.ended_handles()
        pytest.fail(f"no end of {waiting} after {requeued}: {gateway.frames[-8:]}")
    return requeued


@pytest.mark.parametrize(
    ("tier", "requests"),
    [
        pytest.param(ServiceTier.BATCH, 1, marks=pytest.mark.slow, id="batch"),
        pytest.param(ServiceTier.DEFAULT, MOST_SEQUENCES, id="tenant"),
    ],
)
async def test_preempted_jobs_equal_their_undisturbed_outputs(
    request: pytest.FixtureRequest,
    redis_server: RedisServer,
    engine: VllmEngine,
    monkeypatch: pytest.MonkeyPatch,
    tier: ServiceTier,
    requests: int,
) -> None:
    """Each job is preempted for another tenant. The youngest batch jobs are, for requests."""
    monkeypatch.setattr(sequence, "SAFE_TOKENS", (12,))
    is_batch = tier is ServiceTier.BATCH
    alike = [
        msgspec.structs.replace(job, id=f"{job.id}-a", handle=10**6 + job.handle)
        for job in lines_of(is_long=request.config.getoption("--long"))[
            : len(LINES) if is_batch else None
        ]
    ]

    def copied(job: GenerationJob) -> GenerationJob:
        copy = {"id": f"{job.id}-b", "handle": 10**6 + job.handle, "service_tier": tier}
        return msgspec.structs.replace(job, **copy)

    again = [(copied(job), job) for job in alike]
    pairs, preempted = list[tuple[GenerationJob, GenerationJob]](), set[tuple[int, int]]()
    async with connect(redis_server) as redis:
        # A large batch job that an earlier test left would wait for an empty engine.
        await redis.flushall()
        settings: dict[str, Any] = {"gather_seconds": 0.0, "stall_seconds": 60.0}
        gateway = Gateway(redis)
        await gateway.live()
        async with running_engine(redis_server, engine, **settings):
            await gateway.enqueue(*alike)
            await gateway.finished(*alike)
        monkeypatch.setattr(engine, "info", replace(engine.info, max_sequences=MOST_SEQUENCES))
        async with running_engine(redis_server, engine, **settings, preempted_share=100.0):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while again:
                    pairs += again
                    lines = [line for line, _ in again]
                    await gateway.enqueue(*lines)
                    preempted |= await interrupt(gateway, lines, requests=requests)
                    # The engine may end a line while this process waits for a core.
                    handles = {handle for handle, _ in preempted}
                    again = [
                        (copied(line), job)
                        for line, job in again
                        if (len(preempted) <= 2 if is_batch else line.handle not in handles)
                    ]
    for line, job in pairs:
        disturbed, whole = (
            answers_of(
                [each for index in range(job.sequences) for each in gateway.deltas(one, index)],
                job.sequences,
            )
            for one in (line, job)
        )
        assert disturbed == whole
        first, second = (gateway.end(each) for each in (line, job))
        assert isinstance(first, JobFinished)
        assert isinstance(second, JobFinished)
        for name in ("prompt_tokens", "completion_tokens", "chosen"):
            assert getattr(first, name) == getattr(second, name), name
        logprobs = [
            [
                entry.token
                for delta in gateway.deltas(each)
                for entry in decode_logprobs(delta.logprobs)
            ]
            for each in (line, job)
        ]
        assert logprobs[0] == logprobs[1]

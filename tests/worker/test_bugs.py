"""A bug ends one job, or one round of a loop, but neither other jobs nor the engine."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from typing_extensions import override

from contract.messages import GenerationJob, JobFailed, JobFinished, ReturnReason
from contract.outcomes import FailureCode
from contract.sampling import SamplingSpec
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer
from tests.worker.conftest import ENDLESS, Gateway, make_job, running_worker
from worker.engine.base import EngineRequest
from worker.engine.scripted import Script, ScriptedEngine
from worker.execution.claims import Claimer
from worker.execution.runner import Runner, Watcher
from worker.execution.running_job import RunningJob
from worker.execution.sequence import Sequence as EngineSequence
from worker.execution.steps import StepLoop
from worker.queue.leases import Leases
from worker.queue.replies import ReplyWriter

STEADY = Script(step_seconds=0.01)


class Bug:
    """Ends a round of a loop, which it cancels, with an error."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str, *, rounds: int) -> None:
        self.is_due, self.rounds = asyncio.Event(), rounds
        original = getattr(owner, name)

        async def faulty(*arguments: Any) -> None:
            if not self.rounds:
                await original(*arguments)
                return
            tasks = [asyncio.create_task(original(*arguments))]
            tasks.append(asyncio.create_task(self.is_due.wait()))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.is_due.is_set():
                self.rounds -= 1
                raise RuntimeError("a bug")

        patch.setattr(owner, name, faulty)


LOOPS = [
    (StepLoop, "step"),
    (StepLoop, "watch_stalls"),
    (Watcher, "extend_leases"),
    (Watcher, "check_deadlines"),
    (Watcher, "check_gateways"),
    (Watcher, "watch_cancellations"),
    (Watcher, "watch_overflow"),
    (Claimer, "claim"),
    (Runner, "_publish_cache"),
    (Leases, "settle"),
]


async def finishes(gateway: Gateway) -> None:
    job = make_job()
    await gateway.enqueue(job)
    await gateway.finished(job)
    assert isinstance(gateway.end(job), JobFinished)


@pytest.mark.parametrize(("owner", "name"), LOOPS, ids=[name for _, name in LOOPS])
async def test_bug_in_a_loop_blames_no_job_and_the_loop_goes_on(
    redis_server: RedisServer,
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    name: str,
) -> None:
    bug = Bug(monkeypatch, owner, name, rounds=2)
    job = make_job(max_tokens=ENDLESS)
    async with running_worker(redis_server, STEADY) as (_, engine, task):
        await gateway.begin(job)
        bug.is_due.set()
        if owner is not Leases:
            await gateway.read_until(lambda: bool(gateway.returned(job)))
            (returned,) = gateway.returned(job)
            assert (returned.reason, returned.has_progressed) == (ReturnReason.DRAINING, True)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while engine._running:
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while bug.rounds:
                await asyncio.sleep(0.01)
        await finishes(gateway)
        assert not task.done()
    assert 'raise RuntimeError("a bug")' in caplog.text


async def test_lost_frames_do_not_stop_the_writer(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, errors = ReplyWriter._write, [RuntimeError("a bug")]

    async def write(self: ReplyWriter, entries: list[Any]) -> None:
        if entries and errors:
            raise errors.pop()
        await original(self, entries)

    monkeypatch.setattr(ReplyWriter, "_write", write)
    async with running_worker(redis_server, STEADY):
        job = make_job(max_tokens=50)
        await gateway.enqueue(job)
        await gateway.finished(job)
        await finishes(gateway)
    assert gateway.frames[0].number == 2, "the gateway sees that a frame is missing"


async def test_loop_that_fails_again_and_again_ends_the_run_without_blame(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = Bug(monkeypatch, Watcher, "watch_cancellations", rounds=1_000)
    job = make_job(max_tokens=ENDLESS)
    async with running_worker(redis_server, STEADY) as (_, _, task):
        await gateway.begin(job)
        bug.is_due.set()
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(task, PATIENCE_SECONDS)
    await gateway.read_until(lambda: bool(gateway.returned(job)))
    assert {each.reason for each in gateway.returned(job)} == {ReturnReason.DRAINING}


BAD = "bad"


class Faulty(ScriptedEngine):
    """Raises for the sequences of one tenant's jobs that it has begun."""

    @override
    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        if requests[0].cache_salt == BAD:
            await super().submit(requests[:1])
            raise RuntimeError("a bug")
        await super().submit(requests)


def raise_for_bad(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Let a method of a job's part raise if the job is bad."""
    original = getattr(owner, name)

    def faulty(self: Any, *arguments: Any, **named: Any) -> Any:
        job = self.job if isinstance(self, RunningJob) else self._job
        if job.cache_salt == BAD:
            raise RuntimeError("a bug")
        return original(self, *arguments, **named)

    patch.setattr(owner, name, faulty)


async def bad_fails_alone(
    redis_server: RedisServer,
    gateway: Gateway,
    engine_type: type[ScriptedEngine] = ScriptedEngine,
    **changes: Any,
) -> GenerationJob:
    """Run a bad job among others, which must not notice it."""
    running, bad = make_job(max_tokens=ENDLESS), make_job(cache_salt=BAD, n=2, **changes)
    async with running_worker(redis_server, STEADY, engine_type=engine_type) as (_, engine, task):
        await gateway.begin(running)
        await gateway.enqueue(bad, others := make_job())
        await gateway.finished(bad, others)
        end = gateway.end(bad)
        assert isinstance(end, JobFailed)
        assert end.code is FailureCode.ENGINE_ERROR
        assert isinstance(gateway.end(others), JobFinished)
        await finishes(gateway)
        assert not task.done()
        assert len(engine._running) == 1, "nothing of the bad job is left in the engine"
        assert not gateway.returned(running)
    return bad


@pytest.mark.parametrize(
    "changes",
    [{}, {"is_suspect": True}, {"sampling": SamplingSpec(seed=1, bad_words=["word"])}],
    ids=["plain", "suspect", "slow"],
)
async def test_bug_in_a_submission_ends_its_job_only(
    redis_server: RedisServer, gateway: Gateway, changes: dict[str, Any]
) -> None:
    await bad_fails_alone(redis_server, gateway, Faulty, **changes)


PARTS = [
    (RunningJob, "begin"),
    (RunningJob, "requests"),
    (RunningJob, "receive"),
    (RunningJob, "_note_prefill"),
    (RunningJob, "_finish"),
    (EngineSequence, "receive"),
]


@pytest.mark.parametrize(("owner", "name"), PARTS, ids=[f"{o.__name__}.{n}" for o, n in PARTS])
async def test_bug_with_one_job_ends_that_job_only(
    redis_server: RedisServer,
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
) -> None:
    raise_for_bad(monkeypatch, owner, name)
    await bad_fails_alone(redis_server, gateway)


async def test_message_that_cannot_be_encoded_ends_its_job_only(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = EngineSequence.take_piece

    def take_piece(self: EngineSequence) -> Any:
        piece = original(self)
        if self._job.cache_salt == BAD:
            piece.text += "\ud800"
        return piece

    monkeypatch.setattr(EngineSequence, "take_piece", take_piece)
    bad, good = make_job(cache_salt=BAD, max_tokens=ENDLESS), make_job()
    async with running_worker(redis_server, STEADY):
        await gateway.enqueue(bad, good)
        await gateway.finished(good)
        await gateway.read_until(lambda: bad.handle in gateway.ended_handles())
    failed = next(each for each in gateway.ends() if each.handle == bad.handle)
    assert isinstance(failed, JobFailed)
    assert isinstance(gateway.end(good), JobFinished)
    assert not gateway.deltas(bad)
    numbers = [frame.number for frame in gateway.frames]
    assert numbers == list(range(1, len(numbers) + 1))

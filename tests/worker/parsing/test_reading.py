"""Chat jobs in a worker: failing and slow parsers affect only their own job."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import msgspec
import pytest
from typing_extensions import override

from contract.messages import (
    JobFailed,
    JobFinished,
    Parsing,
    Resumption,
    ReturnReason,
    SequenceProgress,
)
from contract.outcomes import FailureCode, FinishReason
from contract.sampling import SamplingSpec
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer
from tests.worker.conftest import Gateway, make_job, resumed, running_worker
from worker.engine.scripted import Script, ScriptedEngine
from worker.parsing import reader as reader_module
from worker.parsing.base import MakeParser, Parsed

STEADY = Script(step_seconds=0.002)
GREEDY = SamplingSpec(seed=1, temperature=0.0)


async def until(condition: Callable[[], bool], *, seconds: float = PATIENCE_SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


class Plain:
    """A parser to which everything is content."""

    def feed(self, token_id: int, text: str) -> Parsed:
        del token_id
        return Parsed(text)

    def finish(self, reason: FinishReason) -> Parsed:
        del reason
        return Parsed()


class Failing(Plain):
    """Fails at the third token."""

    def __init__(self) -> None:
        self._fed = 0

    @override
    def feed(self, token_id: int, text: str) -> Parsed:
        self._fed += 1
        if self._fed == 3:
            raise RuntimeError("no such state")
        return super().feed(token_id, text)


class Blocked(Plain):
    """Blocks until released, but not in the event loop's thread."""

    may_go_on = threading.Event()
    waits = threading.Event()

    @override
    def feed(self, token_id: int, text: str) -> Parsed:
        if threading.current_thread() is not threading.main_thread():
            self.waits.set()
            assert self.may_go_on.wait(PATIENCE_SECONDS)
        return super().feed(token_id, text)


PARSERS = {"failing": Failing, "blocked": Blocked, "plain": Plain}


class ParsersByName:
    """Parsers selected by the name of a job's first tool."""

    def prepare(self, parsing: Parsing, opening: Sequence[int]) -> MakeParser | None:
        del opening
        return PARSERS[parsing.tools[0]["name"]] if parsing.tools else None


class Engine(ScriptedEngine):
    """An engine with these parsers."""

    @override
    async def start(self) -> None:
        await super().start()
        self.parsers = ParsersByName()


def parsing(name: str) -> Parsing:
    return Parsing(tools=[{"name": name}])


@pytest.fixture(params=[False, True], ids=["at once", "in a thread"])
def in_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        read_in_thread(monkeypatch)
    return bool(request.param)


def read_in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse all responses in another thread, from the second token on."""
    monkeypatch.setattr(reader_module, "LONG_SECONDS", -1.0)
    monkeypatch.setattr(reader_module, "_LONG_READS", 1)


async def test_parser_that_fails_ends_its_job_alone(
    redis_server: RedisServer, gateway: Gateway, *, in_thread: bool
) -> None:
    bad, good = (make_job(max_tokens=20, parsing=parsing(name)) for name in ("failing", "plain"))
    async with running_worker(redis_server, STEADY, engine_type=Engine) as (runner, engine, task):
        await gateway.enqueue(bad, good)
        await gateway.finished(bad, good)
        assert not task.done()
        assert not runner._jobs.by_id
        assert not engine._running
    failed = gateway.end(bad)
    assert isinstance(failed, JobFailed)
    assert failed.code is FailureCode.ENGINE_ERROR
    assert len(gateway.token_ids(bad)) <= 2
    assert isinstance(gateway.end(good), JobFinished)
    assert len(gateway.token_ids(good)) == 20


async def test_deltas_do_not_depend_on_the_thread(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [
        make_job(seed=7, max_tokens=90, n=3, parsing=parsing("plain")),
        make_job(seed=8, max_tokens=60, n=2, parsing=parsing("plain"), stream=False),
        make_job(seed=9, max_tokens=60, parsing=parsing("plain"), stop=[" th"]),
        make_job(seed=1, max_tokens=30, n=2, parsing=parsing("plain"), sampling=GREEDY),
    ]
    async with running_worker(redis_server, Script(), engine_type=Engine):
        await gateway.enqueue(*jobs)
        await gateway.finished(*jobs)
    read_in_thread(monkeypatch)
    again = [
        msgspec.structs.replace(job, id=f"{job.id}-2", handle=job.handle + 1000) for job in jobs
    ]
    async with running_worker(redis_server, Script(), engine_type=Engine) as (runner, engine, _):
        await gateway.enqueue(*again)
        await gateway.finished(*again)
        assert not runner._jobs.by_id
        assert not runner._jobs.by_sequence
        await until(lambda: not engine._running)
    for job, same in zip(jobs, again, strict=True):
        for choice in range(job.n):
            assert gateway.text(same, choice) == gateway.text(job, choice)
            assert gateway.token_ids(same, choice) == gateway.token_ids(job, choice)
        one, two = gateway.end(job), gateway.end(same)
        assert isinstance(one, JobFinished)
        assert isinstance(two, JobFinished)
        assert two.completion_tokens == one.completion_tokens


async def test_slow_parser_does_not_block_others_and_keeps_the_order(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_in_thread(monkeypatch)
    Blocked.may_go_on.clear()
    slow = make_job(max_tokens=50, parsing=parsing("blocked"))
    other = make_job(max_tokens=80)
    async with running_worker(redis_server, STEADY, engine_type=Engine, stall_seconds=0.2) as (
        runner,
        engine,
        task,
    ):
        await gateway.enqueue(slow, other)
        await gateway.finished(other)
        await until(lambda: not engine._running)
        assert len(gateway.token_ids(slow)) == 1
        # The engine has finished both, so it does not stall.
        await asyncio.sleep(0.5)
        assert not task.done()
        assert list(runner._jobs.by_id) == [slow.id]
        Blocked.may_go_on.set()
        await gateway.finished(slow)
    assert len(gateway.token_ids(slow)) == 50
    starts = [delta.start for delta in gateway.deltas(slow)]
    assert starts == sorted(starts)


async def test_job_handed_back_during_parsing_resumes_after_the_sent_tokens(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_in_thread(monkeypatch)
    Blocked.may_go_on.clear()
    Blocked.waits.clear()
    job = make_job(max_tokens=50, parsing=parsing("blocked"))
    async with running_worker(redis_server, STEADY, engine_type=Engine) as (runner, _, task):
        await gateway.enqueue(job)
        await until(Blocked.waits.is_set)
        runner.stop()
        await task
        Blocked.may_go_on.set()
    await gateway.read_until(lambda: gateway.returned(job))
    (returned,) = gateway.returned(job)
    assert returned.reason is ReturnReason.DRAINING
    assert len(gateway.token_ids(job)) == 1
    rest = msgspec.structs.replace(resumed(gateway, job), id="rest", parsing=parsing("plain"))
    async with running_worker(redis_server, STEADY, engine_type=Engine):
        await gateway.enqueue(rest)
        await gateway.finished(rest)
    assert len(gateway.token_ids(job)) == 50
    assert [delta.start for delta in gateway.deltas(job)][:2] == [0, 1]


async def test_long_response_of_an_earlier_attempt_is_parsed_in_a_thread(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_LONG_REPLAY_TOKENS", 20)
    Blocked.may_go_on.clear()
    Blocked.waits.clear()
    job = make_job(max_tokens=50, parsing=parsing("blocked"))
    known = Resumption([SequenceProgress([400] * 30)], prompt_tokens=3)
    async with running_worker(redis_server, STEADY, engine_type=Engine):
        await gateway.enqueue(msgspec.structs.replace(job, resumption=known))
        await until(Blocked.waits.is_set)
        Blocked.may_go_on.set()
        await gateway.finished(job)
    assert len(gateway.token_ids(job)) == 20
    assert gateway.deltas(job)[0].start == 30

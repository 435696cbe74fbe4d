"""The canary runs while the engine is idle, compares with its class, and marks what differs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from typing_extensions import override

from contract import keys
from contract.affinity import INEXACT, class_affinity, class_digest
from contract.messages import JobFinished
from tests.support.cases import all_cases
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer
from tests.worker.conftest import (
    ENDLESS,
    MODEL,
    MODEL_FOLDER,
    WORKER,
    Gateway,
    Stepwise,
    connect,
    make_job,
    running_engine,
)
from worker.engine.base import EngineDeadError, EngineStep, TokenScores
from worker.engine.scripted import Script, ScriptedEngine
from worker.execution.canary import FLOAT32, TOKENS, Canary, difference
from worker.execution.runner import Runner

SCRIPT = Script(context_window=2 * ENDLESS)


class Drifting(Stepwise):
    """Adds something to log-probabilities."""

    drift = 0.0

    @override
    async def step(self) -> EngineStep:
        step = await super().step()
        for output in step.outputs:
            for scores in output.logprobs or []:
                scores[:] = [(token_id, logprob + self.drift) for token_id, logprob in scores]
        return step


@asynccontextmanager
async def running(
    redis_server: RedisServer,
    engine: ScriptedEngine,
    found: list[str],
    *,
    interval_seconds: float = 3600.0,
    stall_seconds: float = 600.0,
) -> AsyncIterator[tuple[Runner, Canary, "asyncio.Task[None]"]]:
    async with connect(redis_server) as redis:
        canary = Canary(redis, MODEL, interval_seconds=interval_seconds, on_result=found.append)
        async with running_engine(
            redis_server, engine, gather_seconds=0.0, stall_seconds=stall_seconds, canary=canary
        ) as (runner, task):
            yield runner, canary, task


async def until(number: int, found: list[str]) -> None:
    """Wait until an engine was attached, and its results compared so often."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(found) <= number:
            await asyncio.sleep(0.002)


async def started(engine: ScriptedEngine) -> ScriptedEngine:
    await engine.start()
    return engine


def again(canary: Canary) -> None:
    """Let the next check be due at once."""
    canary._due_at = 0.0


async def test_engine_that_differs_from_its_class_is_marked_until_it_does_not(
    redis_server: RedisServer, redis: Redis, gateway: Gateway
) -> None:
    engine, found = await started(Drifting(MODEL_FOLDER, SCRIPT)), list[str]()
    assert isinstance(engine, Drifting)
    engine.allow()
    digest = engine.info.exactness.digest
    async with running(redis_server, engine, found, interval_seconds=0.02):
        await until(1, found)
        assert {*found} == {""}
        reference = await redis.get(keys.canary(MODEL, digest))
        engine.drift = 0.5
        await until(len(found) + 1, found)
        assert "cold: at token 0, the log-probability of" in found[-1]
        jobs = [make_job() for _ in range(2)]
        await gateway.enqueue(jobs[0])
        await gateway.finished(jobs[0])
        held, digests = keys.held(MODEL, WORKER), {class_digest(digest + INEXACT)}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await redis.smembers(held) != digests:
                await asyncio.sleep(0.01)
        engine.drift = 0.0
        await until(len(found) + 1, found)
        assert found[-1] == ""
        await gateway.enqueue(jobs[1])
        await gateway.finished(jobs[1])
    ends = [gateway.end(job) for job in jobs]
    names = [end.exactness_class for end in ends if isinstance(end, JobFinished)]
    assert names == [digest + INEXACT, digest]
    assert class_affinity(digest + INEXACT) == class_affinity(digest)
    assert await redis.get(keys.canary(MODEL, digest)) == reference
    assert 0 < await redis.ttl(keys.canary(MODEL, digest)) <= 90 * 86_400


async def test_job_that_arrives_ends_the_check_which_is_repeated_later(
    redis_server: RedisServer, redis: Redis, gateway: Gateway
) -> None:
    engine, found = await started(Stepwise(MODEL_FOLDER, SCRIPT)), list[str]()
    assert isinstance(engine, Stepwise)
    async with running(redis_server, engine, found) as (_, canary, _):
        engine.allow(3)
        job = make_job(max_tokens=4)
        await gateway.enqueue(job)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while canary._jobs.idle.is_set() or engine._running.keys() - canary._jobs.by_sequence:
                await asyncio.sleep(0.002)
        assert found == [""], "attached"
        engine.allow()
        await gateway.finished(job)
        assert len(gateway.token_ids(job)) == 4
        assert 59 < canary._backoff.last_seconds < 61
        again(canary)
        # It waits for the time that it has read before.
        await canary.watch()
        assert found == ["", ""]
        assert not canary._backoff.last_seconds


async def test_reference_that_cannot_be_read_is_replaced(
    redis_server: RedisServer, redis: Redis
) -> None:
    engine, found = await started(ScriptedEngine(MODEL_FOLDER, SCRIPT)), list[str]()
    key = keys.canary(MODEL, engine.info.exactness.digest)
    await redis.set(key, b"\xc1")
    async with running(redis_server, engine, found):
        await until(1, found)
    assert found == ["", ""]
    stored: Any = await redis.get(key)
    assert len(msgspec.msgpack.decode(stored)["cold"]) == TOKENS


async def test_engine_without_a_step_in_a_check_is_dead(redis_server: RedisServer) -> None:
    engine = await started(Stepwise(MODEL_FOLDER, SCRIPT))
    async with running(redis_server, engine, [], stall_seconds=0.05) as (_, _, task):
        with pytest.raises(EngineDeadError, match=r"no step for 0.05 s"):
            await task


@all_cases(
    ("expected", "found", "text"),
    [
        ([[(1, -0.5), (2, -2.0)]], [[(1, -0.5), (2, -2.00019)]], ""),
        (
            [[(1, -0.5), (2, -2.0)]],
            [[(1, -0.5), (2, -2.1)]],
            "at token 0, the log-probability of 2",
        ),
        ([[(1, -0.5)]] * 2, [[(1, -0.5)]], "1 tokens instead of 2"),
        # Other alternatives are as likely as the last known one, or likelier.
        ([[(1, -0.5), (2, -2.0)]], [[(1, -0.5), (3, -2.0001)]], ""),
        ([[(1, -0.5), (2, -2.0)]], [[(1, -0.5), (3, -1.9)]], "of 3 is -1.9 instead of -2"),
        ([[(1, -0.5), (2, -2.0)]], [[(1, -0.5), (3, -2.1)]], "of 2 is -2.1 instead of -2"),
        # After a near tie, the texts may differ.
        ([[(1, -0.7), (2, -0.7)], [(5, -0.1)]], [[(2, -0.7), (1, -0.7)], [(9, -0.9)]], ""),
        ([[(1, -0.7), (2, -0.9)], [(5, -0.1)]], [[(2, -0.7), (1, -0.9)], [(5, -0.1)]], "token 0"),
        ([[(1, -0.5)], [(5, -0.1)]], [[(1, -0.5)], [(5, -0.2)]], "at token 1, "),
    ],
)
def test_difference_names_the_first_token_that_is_no_noise(
    expected: list[TokenScores], found: list[TokenScores], text: str
) -> None:
    different = difference(expected, found, FLOAT32.same)
    assert text in different
    assert bool(text) is bool(different)

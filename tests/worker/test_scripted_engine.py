"""The scripted engine: resumption, and death on request."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from contract.sampling import SamplingSpec
from tests.worker.conftest import MODEL_FOLDER
from worker.engine.base import (
    EngineDeadError,
    EngineRequest,
    InvalidRequestError,
    SequenceEnd,
    SequenceOutput,
)
from worker.engine.scripted import Script, ScriptedEngine

PROMPT = [300, 301, 302]
DEADLY = 320


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(
        MODEL_FOLDER,
        Script(completion_tokens=12, deadly_token_id=DEADLY, dies_on_signal=True),
    )
    await engine.start()
    yield engine
    await engine.aclose()


def request_of(
    sampling: SamplingSpec, *, prompt: list[int] = PROMPT, output: list[int] | None = None
) -> EngineRequest:
    return EngineRequest(
        id=f"after-{len(output or [])}",
        prompt_token_ids=prompt,
        output_token_ids=output or [],
        max_tokens=20,
        sampling=sampling,
        seed=7,
        cache_salt="",
        logprobs=2,
    )


async def outputs_of(engine: ScriptedEngine, request: EngineRequest) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    await engine.submit([request])
    while not outputs or outputs[-1].end is None:
        outputs += (await engine.step()).outputs
    return outputs


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSpec(seed=7, temperature=0.0),
        SamplingSpec(seed=7),
        SamplingSpec(seed=7, min_tokens=15),
        SamplingSpec(seed=7, ignore_eos=True),
    ],
    ids=["greedy", "seeded", "min_tokens", "max_tokens"],
)
@pytest.mark.parametrize("cut", [1, 5, 11])
async def test_resumed_sequence_equals_the_undisturbed_one(
    engine: ScriptedEngine, sampling: SamplingSpec, cut: int
) -> None:
    whole = await outputs_of(engine, request_of(sampling))
    earlier = [token for output in whole[:cut] for token in output.token_ids]

    rest = await outputs_of(engine, request_of(sampling, output=earlier))

    reported = [(each.token_ids, each.end, each.logprobs) for each in rest]
    assert reported == [(each.token_ids, each.end, each.logprobs) for each in whole[cut:]]
    assert [each.prompt_tokens for each in rest] == [len(PROMPT)] + [None] * (len(rest) - 1)
    assert rest[-1].end is (SequenceEnd.LENGTH if sampling.ignore_eos else SequenceEnd.STOP)


async def test_earlier_tokens_outside_the_vocabulary_are_refused(engine: ScriptedEngine) -> None:
    request = request_of(SamplingSpec(seed=7), output=[engine.info.vocabulary_size])

    with pytest.raises(InvalidRequestError, match="Token ids must be between"):
        await engine.submit([request])


async def test_steps_of_a_long_prompt_have_no_outputs() -> None:
    engine = ScriptedEngine(MODEL_FOLDER, Script(prefill_seconds_per_token=600))
    await engine.start()
    await engine.submit([request_of(SamplingSpec(seed=7))])
    # A worker whose engine makes no step counts as dead.
    assert (await engine.step()).outputs == []


async def test_a_signal_kills_the_engine_and_not_the_process(engine: ScriptedEngine) -> None:
    stepping = asyncio.create_task(engine.step())
    await asyncio.sleep(0)

    os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(EngineDeadError):
        await stepping
    with pytest.raises(EngineDeadError):
        await engine.submit([request_of(SamplingSpec(seed=7))])


async def test_a_deadly_prompt_kills_the_engine(engine: ScriptedEngine) -> None:
    await engine.submit([request_of(SamplingSpec(seed=7), prompt=[*PROMPT, DEADLY])])

    with pytest.raises(EngineDeadError):
        await engine.step()

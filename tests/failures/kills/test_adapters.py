"""Workers with four slots for eight adapters are killed: every stream is its adapter's."""

from collections.abc import Sequence

import pytest

from tests.failures.chaos.transcript import Transcript
from tests.failures.kills.killing import (
    LONG_KILLS,
    STREAMS,
    StreamRequest,
    assert_kills_change_nothing,
    start_workers,
)
from tests.gateway.batches.conftest import run_sluice
from tests.support.stack import MODEL, Stack
from worker.demo_model import ADAPTERS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3_600)]

NAMES = sorted(path.name for path in ADAPTERS.iterdir())
MODELS = (*NAMES, MODEL)


@pytest.mark.long
def test_streams_of_killed_workers_are_those_of_their_adapters(stack: Stack) -> None:
    start_workers(stack)
    stack.key()
    for name in NAMES:
        command = ("adapters", "add", "--tenant", "acme", name, "--base-model", MODEL)
        run_sluice(stack, *command, "--source", str(ADAPTERS / name))
    assert len(NAMES) == 8
    models = [MODELS[number % len(MODELS)] for number in range(STREAMS)]

    def check(transcripts: Sequence[Transcript]) -> None:
        for model, transcript in zip(models, transcripts, strict=True):
            text = transcript.choices[0].text
            assert (f"The fox is {model}." in text) == (model != MODEL), (model, text)

    requests = [
        StreamRequest(
            "/v1/completions",
            {
                "model": model,
                "prompt": f"Story {number}: once upon a time",
                "max_tokens": 200,
                "ignore_eos": True,
                "temperature": 0,
            },
        )
        for number, model in enumerate(models)
    ]
    assert_kills_change_nothing(stack, requests, kills=LONG_KILLS, check=check)

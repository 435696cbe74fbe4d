"""Speech in vLLM: a model with random weights in Whisper's form, in the worker's engine."""

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from common.not_none import not_none
from contract.messages import Feature
from contract.sampling import SamplingSpec
from tests.support.patience import PATIENCE_SECONDS
from tests.support.processes import wait_until
from tests.support.speech_model import LANGUAGES, WINDOW, sound
from tests.support.stack import make_model, running_stack
from tests.worker.real_engine import MARKS, EngineSlot
from worker.engine.base import EngineRequest
from worker.engine.vllm.engine import VllmEngine

pytestmark = [*MARKS, pytest.mark.long]

_SAMPLES = sound(3)[44:]
"""Without the head of the WAV file."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    make_model("tests.support.speech_model", folder, log=folder / "log")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(engine_slot: EngineSlot, folder: Path) -> VllmEngine:
    return await engine_slot.engine(
        model_path=str(folder), runner="transcription", engine_arguments={"dtype": "float32"}
    )


async def heard(engine: VllmEngine, request: EngineRequest) -> list[int]:
    await engine.submit([request])
    found: list[int] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            for each in (await engine.step()).outputs:
                found += each.token_ids
                if each.end is not None:
                    return found


async def test_a_whisper_model_hears_and_continues(engine: VllmEngine, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    info = engine.info
    assert (info.clip_seconds, info.context_window) == (30, WINDOW)
    assert info.features == [Feature.STRUCTURE]
    start, task, first, last = (
        not_none(tokenizer.token_to_id(f"<|{each}|>"))
        for each in ("startoftranscript", "transcribe", "0.00", "30.00")
    )
    languages = [not_none(tokenizer.token_to_id(f"<|{each}|>")) for each in LANGUAGES]
    grammar = (
        '%llguidance {"no_forcing": true}\n'
        f"start: <[{languages[0]}-{languages[-1]}]> <[{task}]> segment*\n"
        f"segment: <[{first}-{last}]> TEXT <[{first}-{last}]>\n"
        "TEXT: /([^<]|<[^|])*/\n"
    )
    whole = EngineRequest(
        id="whole",
        prompt_token_ids=[start],
        max_tokens=24,
        sampling=SamplingSpec(seed=7, temperature=1.0),
        seed=7,
        cache_salt="",
        grammar=grammar,
        audio=_SAMPLES,
    )
    tokens = await heard(engine, whole)
    assert tokens[0] in languages
    assert tokens[1] == task
    assert first <= tokens[2] <= last
    rest = replace(whole, id="rest", output_token_ids=tokens[:9])
    assert await heard(engine, rest) == tokens[9:]
    other = replace(whole, id="other", audio=bytes(len(_SAMPLES)))
    assert await heard(engine, other) != tokens, "the model hears the audio"


def test_a_gateway_returns_what_a_whisper_model_hears(folder: Path) -> None:
    environment = {
        "SLUICE_RUNNER": "transcription",
        "SLUICE_MODEL_PATH": str(folder),
        "SLUICE_MODEL_NAME": "whisper",
        "SLUICE_TOOL_PARSER": "",
        "SLUICE_REASONING_PARSER": "",
    }
    with running_stack() as stack:
        stack.launch_worker(environment=environment)
        stack.start_gateway()
        stack.await_worker()
        headers = {"authorization": f"Bearer {stack.key()}"}
        with httpx.Client(base_url=stack.url, headers=headers, timeout=PATIENCE_SECONDS) as client:
            wait_until(
                lambda: client.get("/v1/models/whisper").json().get("ready", False),
                what="the model being ready",
            )
            form = {"model": "whisper", "response_format": "verbose_json"}
            files = {"file": ("a.wav", sound(3))}
            answer = client.post("/v1/audio/transcriptions", files=files, data=form).json()
    assert answer["language"] in LANGUAGES
    assert answer["text"].split()
    assert (answer["duration"], answer["usage"]["seconds"]) == (3, 3)
    assert all(0 <= each["start"] <= each["end"] <= 3 for each in answer["segments"])

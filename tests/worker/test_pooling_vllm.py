"""vLLM's pooling runner in the worker's engine: the vectors are those of vLLM's own interface.

`python -m tests.worker.test_pooling_vllm` records them in `embeddings.json`, with vLLM's `LLM`.
"""

import asyncio
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from contract.messages import Feature, Pooling, PoolingSupport, PoolingTask
from contract.sampling import SamplingSpec
from tests.support.patience import PATIENCE_SECONDS
from tests.support.pooling_models import EMBED, TEXTS, reference
from tests.worker.conftest import MODEL_FOLDER
from tests.worker.real_engine import CONTEXT_WINDOW, MARKS, EngineSlot
from worker.engine.base import EngineRequest, InvalidRequestError
from worker.engine.vllm.engine import VllmEngine

pytestmark = [*MARKS, pytest.mark.slow]

RECORD = Path(__file__).with_name("embeddings.json")
LEAST_COSINE = 0.9999


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(engine_slot: EngineSlot) -> VllmEngine:
    return await engine_slot.engine(
        model_path=str(MODEL_FOLDER),
        runner="pooling",
        context_window=CONTEXT_WINDOW,
        engine_arguments={"dtype": "float32"},
    )


def requests(tokenizer: Tokenizer, *texts: str, **options: Any) -> list[EngineRequest]:
    inputs = [tokenizer.encode(text).ids for text in texts]
    pooling = Pooling(PoolingTask.EMBED, list(map(len, inputs)), **options)
    return [
        EngineRequest(
            id=f"{text[:8]} {options}",
            prompt_token_ids=token_ids,
            max_tokens=0,
            sampling=SamplingSpec(seed=0),
            seed=0,
            cache_salt="salt",
            pooling=pooling,
        )
        for text, token_ids in zip(texts, inputs, strict=True)
    ]


async def pooled(engine: VllmEngine, asked: list[EngineRequest]) -> list[tuple[float, ...]]:
    await engine.submit(asked)
    found: dict[str, bytes] = {}
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(found) < len(asked):
            found |= {each.sequence_id: each.pooled for each in (await engine.step()).outputs}
    results = [found[each.id] for each in asked]
    return [struct.unpack(f"<{len(each) // 4}f", each) for each in results]


async def test_vectors_are_those_of_vllm_itself(engine: VllmEngine, tokenizer: Tokenizer) -> None:
    assert engine.info.pooling == PoolingSupport(PoolingTask.EMBED, 256)
    assert engine.info.features == [Feature.CHAT]
    found = await pooled(engine, requests(tokenizer, *TEXTS))
    for vector, expected in zip(found, json.loads(RECORD.read_text()), strict=True):
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)
        assert sum(a * b for a, b in zip(vector, expected, strict=True)) > LEAST_COSINE


async def test_what_the_model_lacks_is_refused(engine: VllmEngine, tokenizer: Tokenizer) -> None:
    # The next request shows that the engine lives.
    with pytest.raises(InvalidRequestError, match="Matryoshka"):
        await engine.submit(requests(tokenizer, "a text", dimensions=8))
    [raw] = await pooled(engine, requests(tokenizer, "a text", is_activated=False))
    [vector] = await pooled(engine, requests(tokenizer, "a text"))
    size = math.hypot(*raw)
    assert size > 2
    assert [number / size for number in raw] == pytest.approx(vector, abs=1e-5)


if __name__ == "__main__":
    RECORD.write_text(json.dumps(reference(EMBED, MODEL_FOLDER)))

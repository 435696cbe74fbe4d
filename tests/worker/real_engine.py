"""The real engine in this process, and jobs that run on it as the worker runs them, without a queue."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer

from contract.messages import GenerationJob, TokenLogprob
from contract.queue import Claim
from tests.worker.conftest import MODEL_FOLDER
from worker.engine.base import EngineStats
from worker.engine.vllm import VllmEngine
from worker.generation import Generation
from worker.logprobs import TokenTexts
from worker.replies import Outbox
from worker.settings import Settings

MARKS = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]
"""Of a module whose tests share an engine."""

EOS = 1
CONTEXT_WINDOW = 1024

EXACT: dict[str, Any] = {
    "model_path": str(MODEL_FOLDER),
    "context_window": CONTEXT_WINDOW,
    "max_sequences": 96,
    # In bfloat16 a batch of another shape can tip a token over.
    "engine_arguments": {"dtype": "float32"},
    "tool_parser": "hermes",
    "reasoning_parser": "qwen3",
}
"""Settings of an engine whose answers are the same whoever else is in its batch, and which reads chats apart."""


@asynccontextmanager
async def running_engine(**settings: Any) -> AsyncIterator[VllmEngine]:
    """Run an engine for the length of a block; the settings are a worker's."""
    engine = VllmEngine(Settings(**settings))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.aclose()


@dataclass
class Results:
    """What came of some jobs, and how full the engine was meanwhile."""

    outboxes: list[Outbox]
    generations: list[Generation]
    stats: list[EngineStats]

    def text(self, job: int, choice: int = 0) -> str:
        return "".join(d.text for d in self.outboxes[job].deltas if d.choice == choice)

    def token_ids(self, job: int, choice: int = 0) -> list[int]:
        deltas = self.outboxes[job].deltas
        return [each for d in deltas if d.choice == choice for each in d.token_ids]

    def logprobs(self, job: int) -> list[TokenLogprob]:
        return [entry for d in self.outboxes[job].deltas for entry in d.logprobs or []]


def generation_of(engine: VllmEngine, job: GenerationJob) -> Generation:
    """Return a job as the worker that has claimed it knows it."""
    tokenizer, texts = _tokenizer(engine.info.tokenizer_json)
    return Generation(
        Claim(job, 1), Outbox("g1"), tokenizer=tokenizer, texts=texts, parsers=engine.parsers
    )


@cache
def _tokenizer(content: bytes) -> tuple[Tokenizer, TokenTexts]:
    tokenizer = Tokenizer.from_buffer(content)
    return tokenizer, TokenTexts(tokenizer)


async def run_jobs(engine: VllmEngine, jobs: Sequence[GenerationJob]) -> Results:
    """Run jobs until all have ended."""
    generations = [generation_of(engine, job) for job in jobs]
    results = Results([generation.outbox for generation in generations], generations, [])
    by_sequence: dict[str, Generation] = {}
    for generation in generations:
        requests = generation.requests()
        by_sequence.update((request.id, generation) for request in requests)
        await engine.submit(requests)
    while by_sequence:
        step = await engine.step()
        if step.stats is not None:
            results.stats.append(step.stats)
        stopped = []
        for output in step.outputs:
            owner = by_sequence.get(output.sequence_id)
            if owner is not None and owner.receive(output):
                del by_sequence[output.sequence_id]
                if output.end is None:
                    stopped.append(output.sequence_id)
        await engine.abort(stopped)
    return results

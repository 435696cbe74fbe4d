"""The real engine in this process, and jobs that run on it as in the worker."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer

from contract.affinity import prefix_affinity
from contract.messages import GenerationJob, TokenLogprob, decode_logprobs
from contract.queue import JobClaim
from tests.support.patience import PATIENCE_SECONDS
from tests.support.preloaded import fork_engine_cores
from tests.worker.conftest import MODEL_FOLDER
from worker.engine.base import EngineStats
from worker.engine.vllm.engine import VllmEngine
from worker.execution.logprobs import TokenTexts
from worker.execution.running_job import RunningJob
from worker.queue.replies import ReplyOutbox
from worker.settings import WorkerSettings

MARKS = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),
]
"""For a module whose tests share an engine."""

EOS = 1
CONTEXT_WINDOW = 1024

EXACT: dict[str, Any] = {
    "model_path": str(MODEL_FOLDER),
    "context_window": CONTEXT_WINDOW,
    "max_sequences": 96,
    # In bfloat16 another batch shape can change a token.
    "engine_arguments": {"dtype": "float32"},
    "tool_parser": "hermes",
    "reasoning_parser": "qwen3",
}
"""Settings of an engine with parsers, whose responses do not depend on the batch."""

BLOCKS = 17
VISION: dict[str, Any] = {
    "context_window": 256,
    "max_sequences": 16,
    "engine_arguments": {
        "dtype": "float32",
        # A KV cache that eight long sequences do not fit in, so that some are preempted.
        "num_gpu_blocks_override": BLOCKS,
        "block_size": 32,
    },
}
"""Settings of an engine for the vision model, with a KV cache so small that it preempts."""


class EngineSlot(AsyncExitStack):
    """Runs one engine at a time. Consecutive modules with the same settings share a start."""

    _settings: dict[str, Any] | None = None
    _engine: VllmEngine

    async def engine(self, **settings: Any) -> VllmEngine:
        """Return an engine with a worker's settings, and close one that has others."""
        if settings != self._settings:
            self._settings = None
            await self.aclose()
            fork_engine_cores()
            self._engine = VllmEngine(WorkerSettings(**settings))
            self.push_async_callback(self._engine.aclose)
            await self._engine.start()
            self._settings = settings
        return self._engine


@dataclass
class Results:
    """Results of some jobs, and how full the engine was."""

    outboxes: list[ReplyOutbox]
    generations: list[RunningJob]
    stats: list[EngineStats]

    def text(self, job: int, choice: int = 0) -> str:
        return "".join(d.text for d in self.outboxes[job].deltas if d.choice == choice)

    def token_ids(self, job: int, choice: int = 0) -> list[int]:
        deltas = self.outboxes[job].deltas
        return [each for d in deltas if d.choice == choice for each in d.token_ids]

    def logprobs(self, job: int) -> list[TokenLogprob]:
        return [entry for d in self.outboxes[job].deltas for entry in decode_logprobs(d.logprobs)]


class Held:
    """What an engine holds."""

    def __init__(self) -> None:
        self.digests = set[bytes]()

    def add(self, digest: bytes) -> None:
        """Hold a digest."""
        self.digests.add(digest)

    def remove(self, digest: bytes) -> None:
        """Hold a digest no longer."""
        self.digests.remove(digest)

    def tokens(self, job: GenerationJob, block_tokens: int) -> list[int]:
        """Return the lengths of the job's prefixes that are held."""
        affinity = prefix_affinity(job.cache_salt, job.prompt_token_ids, block_tokens)
        records = [affinity[start : start + 12] for start in range(0, len(affinity), 12)]
        return [int.from_bytes(each[8:]) for each in records if each[:8] in self.digests]


async def read_cache(engine: VllmEngine, held: Held, until: Callable[[], bool]) -> None:
    """Read what the engine publishes about its cache until a condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not until():
            await engine.read_cache(held)
            await asyncio.sleep(0.01)


def generation_of(engine: VllmEngine, job: GenerationJob) -> RunningJob:
    """Return the generation of a claimed job."""
    tokenizer, texts = _tokenizer(engine.info.tokenizer_json)
    return RunningJob(
        JobClaim(job, 1),
        ReplyOutbox("g1"),
        tokenizer=tokenizer,
        texts=texts,
        parsers=engine.parsers,
    )


@cache
def _tokenizer(content: bytes) -> tuple[Tokenizer, TokenTexts]:
    tokenizer = Tokenizer.from_buffer(content)
    return tokenizer, TokenTexts(tokenizer)


async def run_jobs(
    engine: VllmEngine, jobs: Sequence[GenerationJob], *, begun: asyncio.Event | None = None
) -> Results:
    """Run jobs until all have ended; set `begun` when the first of their outputs arrives."""
    generations = [generation_of(engine, job) for job in jobs]
    results = Results([generation.outbox for generation in generations], generations, [])
    by_sequence: dict[str, RunningJob] = {}
    for generation in generations:
        requests = generation.requests()
        by_sequence.update((request.id, generation) for request in requests)
        await engine.submit(requests)
    while by_sequence:
        step = await engine.step()
        if step.stats is not None:
            results.stats.append(step.stats)
        stopped = []
        if begun is not None and step.outputs:
            begun.set()
        for output in step.outputs:
            owner = by_sequence.get(output.sequence_id)
            if owner is not None and owner.receive(output):
                del by_sequence[output.sequence_id]
                if output.end is None:
                    stopped.append(output.sequence_id)
        await engine.abort(stopped)
    return results

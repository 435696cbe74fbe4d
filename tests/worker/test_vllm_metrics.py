"""vLLM's metrics, passed through, report the engine's work."""

from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from contract.messages import GenerationJob
from contract.sampling import SamplingSpec
from tests.worker.conftest import make_job
from tests.worker.real_engine import (
    BLOCKS,
    MARKS,
    VISION,
    EngineSlot,
    Held,
    generation_of,
    read_cache,
    run_jobs,
)
from worker import telemetry
from worker.engine.base import EngineRequest
from worker.engine.vllm.engine import VllmEngine

pytestmark = [*MARKS, pytest.mark.long]

SEQUENCES, TOKENS = 8, 60
ENDLESS = SamplingSpec(seed=1, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(engine_slot: EngineSlot, vision_folder: Path) -> VllmEngine:
    return await engine_slot.engine(model_path=str(vision_folder), **VISION)


def vllm(name: str, **labels: str) -> float:
    """Return the sum of the samples of one of vLLM's metrics."""
    samples = [
        sample
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
    ]
    assert samples, name
    return sum(sample.value for sample in samples)


async def test_metrics_report_the_engines_work(engine: VllmEngine) -> None:
    names = (
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_preemptions_total",
        "time_to_first_token_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
        "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count",
        "request_time_per_output_token_seconds_count",
        "request_prompt_tokens_sum",
        "request_generation_tokens_sum",
    )
    before = {name: vllm(name) for name in names}
    finished = vllm("request_success_total", finished_reason="length")
    jobs = [job(number) for number in range(SEQUENCES)]
    reported = await run(engine, jobs)
    grown = {name: vllm(name) - value for name, value in before.items()}
    prompt_tokens = sum(len(each.prompt_token_ids) for each in jobs)
    assert grown["prompt_tokens_total"] == prompt_tokens
    assert grown["request_prompt_tokens_sum"] == prompt_tokens
    assert grown["generation_tokens_total"] == SEQUENCES * TOKENS
    assert grown["request_generation_tokens_sum"] == SEQUENCES * TOKENS
    assert vllm("request_success_total", finished_reason="length") - finished == SEQUENCES
    for name in names[3:-2]:
        assert grown[name] == SEQUENCES, name
    # The cache is too small for all of them.
    assert grown["num_preemptions_total"] == reported > 0
    assert vllm("num_requests_waiting") == 0
    assert 0 <= vllm("kv_cache_usage_perc") <= 1
    assert vllm("cache_config_info", num_gpu_blocks=str(BLOCKS)) == 1
    # Gateways have these metrics instead (docs/metrics.md).
    assert vllm("inter_token_latency_seconds_count") == 0


async def test_aborted_sequence_is_dropped(engine: VllmEngine) -> None:
    request = EngineRequest(
        id="aborted",
        prompt_token_ids=[300, 301, 302],
        max_tokens=100,
        sampling=ENDLESS,
        seed=1,
        cache_salt="salt",
    )
    await engine.submit([request])
    await engine.step()
    assert "aborted" in engine._metrics._followed
    await engine.abort(["aborted"])
    assert engine._metrics._followed == {}


async def test_labels_are_those_of_vllm(engine: VllmEngine, vision_folder: Path) -> None:
    await run_jobs(engine, [job(100)])
    labels = {"model_name": vision_folder.name, "engine": "0"}
    assert vllm("generation_tokens_total", **labels) > 0


async def test_evicted_prefixes_are_not_reported(engine: VllmEngine) -> None:
    size, held = engine.info.cache_block_tokens, Held()
    prompts = [[300 + number] * (3 * size) for number in range(9)]
    jobs = [make_job(prompt_token_ids=each, max_tokens=1, sampling=ENDLESS) for each in prompts]
    for each in jobs:
        await run_jobs(engine, [each, each])
    await read_cache(engine, held, lambda: bool(held.tokens(jobs[-1], size)))
    # Sequences that begin together store their blocks twice.
    assert held.tokens(jobs[-1], size) == [2 * size]
    assert held.tokens(jobs[0], size) == []
    assert 0 < len(held.digests) <= BLOCKS


def job(number: int) -> GenerationJob:
    """Return a job that needs many blocks of the KV cache."""
    return make_job(prompt_token_ids=[300 + number] * 10, max_tokens=TOKENS, sampling=ENDLESS)


async def run(engine: VllmEngine, jobs: list[GenerationJob]) -> int:
    """Run jobs to their ends, counting steps as the worker does; return the preemptions."""
    before, left = preemptions(), len(jobs)
    for each in jobs:
        # One sequence each.
        await engine.submit(generation_of(engine, each).requests())
    while left:
        step = await engine.step()
        telemetry.note_step(step)
        left -= sum(output.end is not None for output in step.outputs)
    return preemptions() - before


def preemptions() -> int:
    """Return how many preemptions the worker has counted."""
    return int(REGISTRY.get_sample_value("sluice_worker_preemptions_total") or 0)

"""The canary finds what corrupts the results of vLLM, and nothing in an engine that is right."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from typing_extensions import override

from tests.support.redis_server import RedisServer
from tests.worker.conftest import MODEL, connect, running_engine
from tests.worker.real_engine import EXACT, MARKS, EngineSlot
from worker.engine.base import TokenScores
from worker.engine.vllm.engine import VllmEngine
from worker.engine.vllm.exactness import read_exactness
from worker.execution.canary import Canary, Phase

pytestmark = [*MARKS, pytest.mark.slow]

BLOCKS = 40
SETTINGS: dict[str, Any] = EXACT | {
    "max_sequences": 8,
    "adapter_slots": 1,
    "loaded_adapters": 2,
    "engine_arguments": {"dtype": "float32", "num_gpu_blocks_override": BLOCKS},
}


def plant(worker: Any, fault: str) -> None:
    """Corrupt the engine, in its process with the model."""
    import torch

    runner = worker.model_runner
    for hook in getattr(runner, "planted", ()):
        hook.remove()
    runner.planted = []
    for cache in runner.kv_caches:
        if fault == "swapped blocks":
            cache.copy_(cache.flip(0))
        elif fault == "swapped heads":
            cache.copy_(cache.roll(1, 1))
        elif fault == "lossy cache":
            cache.copy_(cache.to(torch.bfloat16).to(cache.dtype))
    if fault == "another dtype":
        for module in runner.get_model().modules():
            if not [*module.children()]:
                runner.planted.append(module.register_forward_hook(_rounded))
    if fault == "another weight":
        next(runner.get_model().parameters()).data.neg_()


def _rounded(_module: Any, _inputs: Any, output: Any) -> Any:
    import torch

    return output.to(torch.bfloat16).float() if torch.is_tensor(output) else output


@dataclass(eq=False)
class PlantedCanary(Canary):
    """Plants a fault before one of the runs."""

    fault: str = ""
    before: Phase = Phase.COLD
    found: list[str] = field(default_factory=list)

    @override
    async def run(self, phase: Phase, salt: str, output: list[int]) -> list[TokenScores]:
        if phase is self.before:
            await self._llm.collective_rpc("plant", args=(self.fault,))
        return await super().run(phase, salt, output)

    async def check(self, fault: str = "", before: Phase = Phase.COLD) -> str:
        """Return what the canary finds after a fault."""
        self.fault, self.before = fault, before
        await self.watch()
        return self.found[-1]

    @property
    def _llm(self) -> Any:
        engine: Any = self._engine
        return engine._llm


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(engine_slot: EngineSlot) -> VllmEngine:
    from vllm.v1.worker.worker_base import WorkerBase

    WorkerBase.plant = plant
    return await engine_slot.engine(**SETTINGS)


@pytest_asyncio.fixture(loop_scope="session")
async def canary(redis_server: RedisServer, engine: VllmEngine) -> AsyncIterator[PlantedCanary]:
    async with (
        connect(redis_server) as redis,
        running_engine(redis_server, engine, gather_seconds=0.0, stall_seconds=600.0) as (
            runner,
            _,
        ),
    ):
        await redis.flushall()
        canary = PlantedCanary(redis, MODEL, interval_seconds=0.001)
        canary.on_result = canary.found.append
        canary.attach(engine, runner._jobs)
        yield canary


async def test_each_planted_fault_is_found_in_one_check(
    canary: PlantedCanary, engine: VllmEngine
) -> None:
    assert await canary.check() == "", "the first one writes the reference"
    for fault, before in (
        ("swapped blocks", Phase.CACHED),
        ("swapped heads", Phase.CACHED),
        ("lossy cache", Phase.CACHED),
        ("another dtype", Phase.COLD),
        ("another dtype", Phase.RESUMED),
    ):
        different = await canary.check(fault, before)
        assert different.startswith(f"{before}: at token "), (fault, different)
        assert not canary._jobs.is_exact
        for _ in range(3):
            assert await canary.check() == "", fault
        assert canary._jobs.is_exact


async def test_class_follows_from_what_changes_results(
    canary: PlantedCanary, engine: VllmEngine
) -> None:
    llm, arguments = canary._llm, SETTINGS["engine_arguments"]
    mine = await read_exactness(llm, arguments, {})
    facts = mine.facts
    assert (facts["dtype"], facts["kv_cache_dtype"], facts["runner"]) == (
        "float32",
        "float32",
        "v1",
    )
    assert (facts["attention"], facts["adapters"]) == ("CPU_ATTN", "rank 16")
    assert facts["engine"] == engine.info.name
    assert facts["weights"] == engine.info.exactness.facts["weights"]
    for neutral in ({}, {"max_num_seqs": 4}, {"dtype": "float32"}):
        assert await read_exactness(llm, arguments | neutral, {"HOME": "/"}) == mine
    classes = {mine.digest}
    for more, variables in (
        ({"moe_backend": "triton"}, {}),
        ({"hf_overrides": {"rope_theta": 5}}, {}),
        ({}, {"VLLM_USE_FLASHINFER_SAMPLER": "1"}),
    ):
        classes.add((await read_exactness(llm, arguments | more, variables)).digest)
    config = llm.vllm_config
    for name, change in (
        ("cache_config", {"cache_dtype": "fp8"}),
        ("parallel_config", {"tensor_parallel_size": 2}),
        ("model_config", {"quantization": "fp8"}),
    ):
        part = getattr(config, name)
        before = {each: getattr(part, each) for each in change}
        vars(part).update(change)
        classes.add((await read_exactness(llm, arguments, {})).digest)
        vars(part).update(before)
    await llm.collective_rpc("plant", args=("another weight",))
    changed = await read_exactness(llm, arguments, {})
    assert {name for name in facts if facts[name] != changed.facts[name]} == {"weights"}
    assert len({*classes, changed.digest}) == 8
    await llm.collective_rpc("plant", args=("another weight",))  # It has its sign again.
    assert await read_exactness(llm, arguments, {}) == mine

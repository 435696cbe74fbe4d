"""Prompts of several tenants in vLLM's own scheduler, which computes nothing here."""

from concurrent.futures import Future
from typing import Any

import pytest

from tests.worker.conftest import MODEL_FOLDER
from worker.engine.vllm import prompt_turns
from worker.engine.vllm.prompt_turns import PromptTurns, payer

pytestmark = pytest.mark.filterwarnings("ignore")  # Of libraries that vLLM loads.

STEP_TOKENS = 256
LONGEST = 2_048
BLOCK = 16


class Steps:
    """A scheduler of vLLM with chunked prefill, and what its steps process."""

    def __init__(self, *, blocks: int = 1_000, is_chunked: bool = True) -> None:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        config = EngineArgs(
            model=str(MODEL_FOLDER),
            max_num_batched_tokens=STEP_TOKENS if is_chunked else LONGEST,
            max_num_seqs=16,
            max_model_len=LONGEST,
            enable_chunked_prefill=is_chunked,
            scheduling_policy="priority",
            async_scheduling=False,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler: Any = Scheduler(
            config,
            KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            StructuredOutputManager(config),
            BLOCK,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._turns = PromptTurns()
        self._prompts = 0

    def add(
        self,
        name: str,
        tokens: int,
        *,
        weight: float = 1.0,
        prompt: int = 0,
        priority: int = 0,
        is_compiling: bool = False,
    ) -> None:
        """Add a request of the tenant with whose letter its name begins."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.request import Request

        self._prompts += 1
        outputs = StructuredOutputsParams(json_object=True) if is_compiling else None
        params = SamplingParams(max_tokens=1, structured_outputs=outputs)
        params.update_from_generation_config({}, 0)
        request = Request(
            name,
            [prompt or self._prompts] * tokens,
            params,
            None,
            priority=priority,
            session_id=payer(name[0], weight),
            block_hasher=self._hasher,
        )
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = Future()
        self._turns.arrive(self.scheduler, request)
        self.scheduler.add_request(request)

    def step(self) -> dict[str, int]:
        """Return how many tokens of each request the next step processes."""
        from vllm.v1.outputs import ModelRunnerOutput

        with self._turns.of_next_step(self.scheduler):
            output = self.scheduler.schedule()
        taken: dict[str, int] = output.num_scheduled_tokens
        names = [*taken]
        sampled: list[list[int]] = [
            [] if self.scheduler.requests[name].is_prefill_chunk else [7] for name in names
        ]
        result = ModelRunnerOutput(
            names, {name: index for index, name in enumerate(names)}, sampled
        )
        self.scheduler.update_from_output(output, result)
        return taken

    def run(self, steps: int = 100) -> list[str]:
        """Return the requests in the order in which their prompts were processed."""
        before, order = {*self.scheduler.requests}, list[str]()
        for _ in range(steps):
            self.step()
            left = {*self.scheduler.requests}
            order += sorted(before - left)
            before = left
            if not left:
                break
        return order


SHARED_TOKENS = 64


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    monkeypatch.setattr(prompt_turns, "SHARED_TOKENS", SHARED_TOKENS)
    return Steps()


def test_prompts_of_a_tenant_with_many_wait_for_those_of_others(steps: Steps) -> None:
    for number in range(20):
        steps.add(f"a{number}", STEP_TOKENS)
    steps.step()
    steps.add("b", 100)
    steps.add("c", 100)
    assert {"b", "c"} <= steps.step().keys()


def test_a_long_prompt_lets_a_step_process_a_short_one(steps: Steps) -> None:
    steps.add("a", 6 * STEP_TOKENS)
    assert steps.step() == {"a": STEP_TOKENS}
    steps.add("b", 100)
    assert steps.step() == {"b": 100, "a": STEP_TOKENS - 100}
    assert steps.step() == {"a": STEP_TOKENS}


def test_a_step_with_a_short_prompt_has_little_of_long_ones_of_others(steps: Steps) -> None:
    steps.add("a", 6 * STEP_TOKENS)
    steps.step()
    steps.add("b", 20)
    assert steps.step() == {"b": 20, "a": SHARED_TOKENS}
    steps.run()
    steps.add("a1", 2 * STEP_TOKENS)
    steps.add("a2", 2 * STEP_TOKENS)
    steps.step()
    steps.add("b1", 20)
    steps.add("a3", 20)
    assert steps.step() == {"b1": 20, "a1": SHARED_TOKENS + 20}, "a3 has a later turn"


def test_prompts_of_one_tenant_or_of_one_size_fill_the_steps(steps: Steps) -> None:
    for number in range(3):
        steps.add(f"a{number}", 20)
    steps.add("a", 6 * STEP_TOKENS)
    assert sum(steps.step().values()) == STEP_TOKENS
    steps.run()
    for number in range(6):
        steps.add(f"a{number}", 40)
        steps.add(f"b{number}", 40)
    assert sum(steps.step().values()) > STEP_TOKENS - 40


def test_a_long_prompt_waits_for_one_that_fills_more_than_half_a_step(steps: Steps) -> None:
    steps.add("a", 6 * STEP_TOKENS)
    steps.step()
    steps.add("b", STEP_TOKENS - 10)
    assert steps.step() == {"b": STEP_TOKENS - 10}


def test_steps_are_whole_while_the_grammar_of_a_short_prompt_is_compiled(steps: Steps) -> None:
    steps.add("a", 6 * STEP_TOKENS)
    steps.add("b", 20, is_compiling=True)
    assert [steps.step() for _ in range(4)] == [{"a": STEP_TOKENS}] * 4


def test_long_prompts_end_one_after_the_other(steps: Steps) -> None:
    """None ends later than if tenants took turns, and most of them earlier."""
    steps.add("a", 4 * STEP_TOKENS)
    steps.step()
    steps.add("b", 4 * STEP_TOKENS)
    steps.add("c", STEP_TOKENS)
    assert steps.run() == ["c", "a", "b"]


def test_no_tenant_keeps_anothers_long_prompt_from_ending(steps: Steps) -> None:
    steps.add("a", 5 * STEP_TOKENS)
    steps.step()
    sent = 0
    while "a" in steps.scheduler.requests:
        sent += 1
        steps.add(f"b{sent}", STEP_TOKENS)
        steps.step()
    assert 4 <= sent <= 9, "they share the steps"


def test_weights_decide_how_tenants_share(steps: Steps) -> None:
    for number in range(12):
        steps.add(f"a{number:02}", STEP_TOKENS, weight=3.0)
        steps.add(f"b{number:02}", STEP_TOKENS)
    first = steps.run()[:8]
    assert len([each for each in first if each[0] == "a"]) in {6, 7}


def test_what_is_cached_does_not_count(steps: Steps) -> None:
    steps.add("a", 6 * BLOCK, prompt=900)
    steps.run()
    for number in range(3):
        steps.add(f"b{number}", 6 * BLOCK, prompt=901)
    steps.add("a1", 6 * BLOCK, prompt=900)
    tokens = {name: request.turn.tokens for name, request in steps.scheduler.requests.items()}
    assert tokens == {"b0": 6 * BLOCK, "b1": 1, "b2": 1, "a1": BLOCK}


def test_a_long_prompt_continues_if_the_others_cannot_begin() -> None:
    steps = Steps(blocks=2 + 6 * STEP_TOKENS // BLOCK)
    steps.add("a", 6 * STEP_TOKENS)
    for _ in range(3):
        steps.step()
    steps.add("b", 4 * STEP_TOKENS)
    assert steps.run(30) == ["a", "b"]


def test_a_prompt_goes_before_the_long_ones_of_many_tenants(steps: Steps) -> None:
    for tenant in "bcdefg":
        steps.add(tenant, 2 * STEP_TOKENS)
    for _ in range(5):
        steps.step()
    steps.add("a", 10)
    assert "a" in steps.step(), "although two of them have ended"


@pytest.mark.parametrize("is_beside_compiling", [False, True])
def test_prompts_that_were_processed_alone_do_not_count(
    steps: Steps, *, is_beside_compiling: bool
) -> None:
    if is_beside_compiling:
        steps.add("c", 1, is_compiling=True)
    for number in range(8):
        steps.add(f"a{number}", STEP_TOKENS)
        steps.step()
    steps.add("b", 2 * STEP_TOKENS)
    steps.add("a", STEP_TOKENS)
    assert steps.run(20) == ["a", "b"]


def test_requests_do_not_pay_for_batch_jobs_of_their_tenant(steps: Steps) -> None:
    for number in range(8):
        steps.add(f"a{number}", STEP_TOKENS, priority=1)
    steps.add("b", STEP_TOKENS)
    steps.add("a", STEP_TOKENS - 1)
    assert steps.run()[:2] == ["a", "b"]


def test_a_prompt_begins_that_has_lost_its_cached_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_turns, "SHARED_TOKENS", SHARED_TOKENS)
    steps = Steps(is_chunked=False)
    steps.add("b", 20 * BLOCK, prompt=900)
    steps.run()
    steps.add("b1", 20 * BLOCK, prompt=900)
    steps.scheduler.reset_prefix_cache()
    steps.add("a", LONGEST // 2)
    assert {*steps.run(2)} == {"a", "b1"}

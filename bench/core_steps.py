"""What vLLM itself does for one turn of a long session, step by step: `python -m bench.core_steps`.

The steps run in this process with vLLM's own classes, and without a model. Each result is the
median of five turns, in milliseconds of CPU; 2,242 tokens of a turn are new.
"""

import time
from collections.abc import Callable
from functools import partial
from random import Random
from statistics import median
from typing import Any, TypeVar

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from bench.agents import LONG, NEW_TOKENS
from contract.prompts import packed

TURNS = 6
BLOCK_TOKENS = (16, 128)
_WINDOW = 262_144

T = TypeVar("T")


def main() -> None:
    """Measure blocks of each size and print the steps."""
    for size in BLOCK_TOKENS:
        print(f"blocks of {size} tokens")
        for step, spent in _steps(size).items():
            print(f"  {median(spent[1:]):6.2f} ms, in a first turn {spent[0]:6.2f} ms  {step}")


def _steps(block_tokens: int) -> dict[str, list[float]]:
    """Return the CPU of each step in each turn, in milliseconds."""
    init_none_hash(sha256)
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=32, dtype=torch.float16
    )
    config = KVCacheConfig(
        num_blocks=4 * _WINDOW // block_tokens,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        hash_block_size=block_tokens,
    )
    manager = KVCacheManager(
        config,
        max_model_len=_WINDOW,
        scheduler_block_size=block_tokens,
        hash_block_size=block_tokens,
        log_stats=True,
        enable_kv_cache_events=True,
    )
    encode, decode = MsgpackEncoder().encode, MsgpackDecoder(EngineCoreRequest).decode
    hasher = get_request_block_hasher(block_tokens, sha256)
    whole = packed(Random(0).choices(range(150_000), k=LONG))
    spent: dict[str, list[float]] = {}

    def step(name: str, work: Callable[[], T]) -> T:
        began = time.process_time()
        result = work()
        spent.setdefault(name, []).append(1e3 * (time.process_time() - began))
        return result

    for number in range(TURNS):
        ids = whole[: LONG - NEW_TOKENS * (TURNS - 1 - number)]
        listed = step("worker: the list of ids", ids.tolist)
        step("worker: max(ids) of InputProcessor", partial(max, listed))
        made = EngineCoreRequest(
            request_id=f"{number}",
            prompt_token_ids=listed,
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=16),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt="salt",
            data_parallel_rank=None,
        )
        sent: Any = step("worker: encode EngineCoreRequest", partial(encode, made))
        got = step("core: decode EngineCoreRequest", partial(decode, sent))
        request = step(
            "core: Request, a hash of each block",
            partial(Request.from_engine_core_request, got, hasher),
        )
        blocks, hit, *_ = step(
            "core: get_computed_blocks, a look at each block",
            partial(manager.get_computed_blocks, request),
        )
        step(
            "core: allocate_slots",
            partial(manager.allocate_slots, request, request.num_tokens - hit, hit, blocks),
        )
        request.num_computed_tokens = request.num_tokens
        manager.take_events()
        step("core: free", partial(manager.free, request))
    return spent


if __name__ == "__main__":
    main()

"""A plugin that vLLM runs first in each of its processes, if the interpreter is on."""

import sys
from typing import Any

_USERS = ("vllm.v1.worker.gpu.sample.sampler", "vllm.v1.worker.gpu.sample.states")


def prepare() -> None:
    """Patch what the interpreter cannot do."""
    _replace_top_k_top_p()
    _accept_any_mask()


def _replace_top_k_top_p() -> None:
    """Use vLLM's PyTorch version of top-k and top-p: the interpreter cannot run Triton's."""
    from vllm.v1.sample.ops import topk_topp_sampler

    def apply_top_k_top_p(logits: Any, k: Any, p: Any) -> Any:
        if k is None and p is None:
            return logits
        return topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    topk_topp_sampler.apply_top_k_top_p = apply_top_k_top_p
    for user in _USERS:
        if user in sys.modules:
            vars(sys.modules[user])["apply_top_k_top_p"] = apply_top_k_top_p


def _accept_any_mask() -> None:
    """Let kernels store with a mask that is the result of arithmetic, as that of grammars is."""
    from triton.runtime.interpreter import InterpreterBuilder

    create_masked_store = InterpreterBuilder.create_masked_store

    def create(builder: Any, pointers: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return create_masked_store(builder, pointers, value, mask, cache_policy)

    InterpreterBuilder.create_masked_store = create

"""vLLM plugin: vLLM calls `prepare` first in each process (entry point in pyproject.toml)."""

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.util import register_after_fork
from threading import Thread
from typing import Any

from contract.grammar import PARSER_LIMITS
from worker.engine.vllm.batch_hold import prepare_batch_hold
from worker.engine.vllm.exactness import prepare_exactness
from worker.engine.vllm.grammar_hold import prepare_grammar_hold
from worker.engine.vllm.prompt_turns import prepare_prompt_turns
from worker.engine.vllm.resumption import prepare_resumption
from worker.engine.vllm.thinking_budget import prepare_thinking_budget
from worker.samplers.reported import REPORTED

_log = logging.getLogger(__name__)

_PARENT_DIED = 70
_POLL_SECONDS = 0.0001


def prepare() -> None:
    """Make a vLLM process safe to run next to the worker."""
    _allow_matrix_tiles()
    _limit_grammars()
    prepare_resumption()
    prepare_thinking_budget()
    prepare_base_rows()
    prepare_waits()
    prepare_reported_rows()
    prepare_prompt_turns()
    prepare_batch_hold()
    prepare_grammar_hold()
    prepare_exactness()
    _end_with_parent()
    # vLLM does not prepare forks of a prepared process. On GPUs it forks the engine core.
    register_after_fork(prepare, _take_over)


def _allow_matrix_tiles() -> None:
    """Request the CPU's matrix tiles (AMX) from the kernel, if available.

    vLLM's CPU attention uses them without a request. If no earlier matrix product has requested
    them, as with a first batch of one token, the first step crashes with "illegal instruction".
    """
    import torch

    # torch has no public names for these.
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        _log.warning(
            "The kernel denies access to the CPU's matrix tiles (AMX), which vLLM tries to use."
        )


def _limit_grammars() -> None:
    """Limit the cost of grammars, which vLLM itself does not limit.

    Some grammars become more ambiguous the longer their text is. A single one could delay every
    step, and so all requests, by a quarter of a second.
    """
    from llguidance import LLMatcher, LLParserLimits
    from vllm.v1.structured_output import backend_guidance as guidance

    limits = LLParserLimits(**PARSER_LIMITS)
    accept_any = guidance.GuidanceGrammar.accept_tokens

    def compile_grammar(backend: Any, kind: Any, text: str, **_: Any) -> Any:
        """Compile a grammar. Raises ValueError, which ends only this request."""
        serialized = guidance.serialize_guidance_grammar(
            kind, text, backend.disable_any_whitespace, backend.disable_additional_properties
        )
        matcher = LLMatcher(backend.ll_tokenizer, serialized, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return guidance.GuidanceGrammar(
            ll_matcher=matcher, ll_tokenizer=backend.ll_tokenizer, vocab_size=backend.vocab_size
        )

    def accept_tokens(grammar: Any, request_id: str, tokens: list[int]) -> bool:
        # Beyond its limits, llguidance allows only the end of the
        # text, which vLLM would treat as the end of a complete text.
        is_accepted: bool = accept_any(grammar, request_id, tokens)
        return is_accepted and not grammar.ll_matcher.is_error()

    # The worker need not compile it, too: the gateway has, and the engine's process does.
    guidance.validate_guidance_grammar = lambda *_arguments, **_options: None
    guidance.GuidanceBackend.compile_grammar = compile_grammar
    guidance.GuidanceGrammar.accept_tokens = accept_tokens


def _take_over(_: object) -> None:
    """Detach this fork from its parent's event loop: a shared file delivers it signals."""
    signal.set_wakeup_fd(-1)
    _end_with_parent()


def _end_with_parent() -> None:
    """End this process when its parent has exited for any reason.

    Otherwise vLLM's engine core would survive if its parent is killed while loading the model.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_exit_after, args=(parent.join,), name="end-with-parent", daemon=True).start()


def _exit_after(wait: Callable[[], object]) -> None:
    wait()
    os._exit(_PARENT_DIED)


def prepare_base_rows() -> None:
    """Patch this vLLM process so that adapters do not change rows of the base model.

    vLLM marks these rows of a batch with the slot -1. Its kernels for GPUs skip them. Its
    operations in torch take -1 as an index, and apply the adapter in the last slot: another
    tenant's (vllm-project/vllm#48421). These parts of vLLM are private, so this fits one version.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def bgmv_shrink(
        inputs: Any, weights: Any, output: Any, slots: Any, scaling: float = 1.0
    ) -> None:
        """Compute the first product. Rows of zeros add nothing in the second one."""
        shrink(inputs, weights, output, slots, scaling)
        output[slots < 0] = 0

    lora_ops.bgmv_shrink = bgmv_shrink
    punica_cpu.bgmv_shrink = bgmv_shrink


def prepare_waits() -> None:
    """Patch this vLLM process to wait for its other processes without using a core.

    On CPUs the model runs in a process of its own. Where it and the engine core wait for each
    other, vLLM polls shared memory without a pause for a second, so both always use a core, which
    the model, the worker and gateways lack. This part of vLLM is private, so this fits one version.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        shm_broadcast.sched_yield = partial(time.sleep, _POLL_SECONDS)


def prepare_reported_rows() -> None:
    """Patch this vLLM process to report the rows in `REPORTED`, in either of its model runners."""
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample import sampler

    gather, compute = Sampler.gather_logprobs, sampler.compute_topk_scores

    def gather_logprobs(logprobs: Any, *others: Any, **options: Any) -> Any:
        return gather(REPORTED.put_into(logprobs), *others, **options)

    def compute_topk_scores(logits: Any, *others: Any, **options: Any) -> Any:
        return compute(REPORTED.put_into(logits), *others, **options)

    Sampler.gather_logprobs = staticmethod(gather_logprobs)
    sampler.compute_topk_scores = compute_topk_scores

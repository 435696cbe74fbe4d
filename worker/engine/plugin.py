"""What every process of vLLM does first: vLLM calls `prepare` in each of them (entry point in pyproject.toml)."""

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.util import register_after_fork
from threading import Thread
from typing import Any

from contract.grammar import PARSER_LIMITS
from worker.engine.resumption import prepare_resumption
from worker.engine.thinking_budget import prepare_thinking_budget

_log = logging.getLogger(__name__)

_PARENT_DIED = 70


def prepare() -> None:
    """Make a process of vLLM safe to run beside us."""
    _allow_matrix_tiles()
    _limit_grammars()
    prepare_resumption()
    prepare_thinking_budget()
    _end_with_parent()
    # vLLM prepares no fork of a process that it has prepared. On GPUs it forks the engine core.
    register_after_fork(prepare, _take_over)


def _allow_matrix_tiles() -> None:
    """Ask the kernel for the CPU's matrix tiles (AMX), where there are any.

    vLLM's CPU attention uses them without asking. Where no earlier matrix product has asked, as with a
    first batch of one token, the first step ends the process with "illegal instruction".
    """
    import torch

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():  # noqa: SLF001 - torch has no public name
        _log.warning("The kernel refuses the CPU's matrix tiles (AMX), which vLLM will try to use.")


def _limit_grammars() -> None:
    """Have grammars run within limits, of which vLLM itself sets none.

    Some grammars become ever more ambiguous the longer their text is. One of them alone would hold up
    every step, and so everybody, by a quarter of a second.
    """
    from llguidance import LLMatcher, LLParserLimits
    from vllm.v1.structured_output import backend_guidance as guidance

    limits = LLParserLimits(**PARSER_LIMITS)
    accept_any = guidance.GuidanceGrammar.accept_tokens

    def compile_grammar(backend: Any, kind: Any, text: str, **_: Any) -> Any:
        """Compile a grammar. Raises ValueError, which ends the one request only."""
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
        # Beyond the limits llguidance allows nothing but the end of the text, which vLLM would take
        # for the end of a whole one.
        is_accepted: bool = accept_any(grammar, request_id, tokens)
        return is_accepted and not grammar.ll_matcher.is_error()

    guidance.GuidanceBackend.compile_grammar = compile_grammar
    guidance.GuidanceGrammar.accept_tokens = accept_tokens


def _take_over(_: object) -> None:
    """Make this fork independent of the event loop of its parent, which receives signals by a file that both have."""
    signal.set_wakeup_fd(-1)
    _end_with_parent()


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, however that came about.

    vLLM's engine core would stay behind where its front is killed while the model is being loaded.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_end_behind, args=(parent.join,), name="end-with-parent", daemon=True).start()


def _end_behind(wait: Callable[[], object]) -> None:
    wait()
    os._exit(_PARENT_DIED)

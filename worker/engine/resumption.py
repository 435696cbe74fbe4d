"""Sequences of which an earlier attempt has put out tokens: how vLLM goes on behind them.

To vLLM such a sequence is a request that it has preempted: its output is read again together with the
prompt. Only that a request begins like this is new to it. These parts of vLLM are private, so this module
fits one version of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from worker.engine.base import EngineRequest, SequenceOutput
from worker.engine.thinking_budget import forget_broken_character, is_bounded

_KEY = "sluice_output_token_ids"
_PHILOX_STEP = 4


def replayed_token_ids(request: EngineRequest) -> list[int]:
    """Return the earlier tokens if they are to be sampled once more.

    Mirostat's state follows from the surprise of every token, which only another look at the model's
    logits tells.
    """
    chain = request.sampling.chain
    has_state = chain is not None and chain.mirostat is not None and not request.sampling.is_greedy
    return request.output_token_ids if has_state else []


def output_arguments(request: EngineRequest) -> dict[str, Any]:
    """Return the part of a sequence's `SamplingParams.extra_args` that tells its earlier tokens."""
    if not request.output_token_ids or replayed_token_ids(request):
        return {}
    return {_KEY: request.output_token_ids}


def prepare_resumption() -> None:
    """Have this process of vLLM let requests begin with output."""
    _begin_with_output()
    _begin_grammars_behind_output()
    _tell_older_runner()


@dataclass(slots=True)
class _Resumed:
    prompt_tokens: int
    replayed_tokens: int
    """Tokens that are still to be sampled once more."""


class ResumedSequences:
    """Has sequences put out nothing that was put out before."""

    def __init__(self) -> None:
        self._begun: dict[str, _Resumed] = {}

    def add(self, sequence_id: str, *, prompt_tokens: int, replayed_tokens: int) -> None:
        """Follow a sequence until it puts out a token of its own, with which its prompt is reported."""
        self._begun[sequence_id] = _Resumed(prompt_tokens, replayed_tokens)

    def forget(self, sequence_ids: Iterable[str]) -> None:
        """Follow sequences no more; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            self._begun.pop(sequence_id, None)

    def own(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """Return what is new of one step's outputs."""
        if not self._begun:
            return outputs
        return [own for each in outputs if (own := self._own(each)) is not None]

    def _own(self, output: SequenceOutput) -> SequenceOutput | None:
        resumed = self._begun.get(output.sequence_id)
        if resumed is None:
            return output
        again = min(len(output.token_ids), resumed.replayed_tokens)
        resumed.replayed_tokens -= again
        if again == len(output.token_ids) and output.end is None:
            return None
        del self._begun[output.sequence_id]
        return replace(
            output,
            token_ids=output.token_ids[again:],
            logprobs=None if output.logprobs is None else output.logprobs[again:],
            prompt_tokens=resumed.prompt_tokens,
            cached_tokens=0,
        )


def _output(sampling_params: Any) -> list[int]:
    extra_args = None if sampling_params is None else sampling_params.extra_args
    token_ids: list[int] = (extra_args or {}).get(_KEY, [])
    return token_ids


def _begin_with_output() -> None:
    from vllm.v1.request import Request

    make = Request.from_engine_core_request

    def from_engine_core_request(core_request: Any, block_hasher: Any) -> Any:
        request = make(core_request, block_hasher)
        if token_ids := _output(core_request.sampling_params):
            request.append_output_token_ids(token_ids)
            # They are those of a prompt; vLLM holds that no more than that is found in its cache.
            request.prefill_stats = None
        return request

    Request.from_engine_core_request = from_engine_core_request


def _begin_grammars_behind_output() -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    create = StructuredOutputManager._create_grammar  # noqa: SLF001  (there is no public hook)

    def create_grammar(manager: Any, request: Any) -> Any:
        """Compile a grammar. Raises ValueError, which ends the one request only."""
        grammar = create(manager, request)
        output = list(request.output_token_ids)
        for position, token_id in enumerate(output):
            if is_bounded(request):
                forget_broken_character(grammar, output[:position], token_id)
            if not grammar.accept_tokens(request.request_id, [token_id]):
                raise ValueError("earlier output does not match the grammar")
        return grammar

    StructuredOutputManager._create_grammar = create_grammar  # noqa: SLF001  (as above)


def _tell_older_runner() -> None:
    """Have the runner for CPUs tell output from prompt; the one for GPUs does so by itself."""
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    initialize = CachedRequestState.__post_init__

    def post_init(state: Any) -> None:
        initialize(state)
        if token_ids := _output(state.sampling_params):
            state.output_token_ids.extend(token_ids)
            if state.generator is not None:
                _draw_again(state.generator, len(token_ids))

    CachedRequestState.__post_init__ = post_init


def _draw_again(generator: Any, tokens: int) -> None:
    """Take from a seeded sequence's generator what has been drawn for its earlier tokens."""
    import torch

    if generator.device.type == "cpu":
        # For each token, `forward_cpu` of vLLM's TopKTopPSampler draws one number from this range.
        torch.randint(0, 2**31, (tokens,), generator=generator)
    else:
        # By as much as vLLM itself moves a generator back where it takes back a draw.
        generator.set_offset(generator.get_offset() + _PHILOX_STEP * tokens)

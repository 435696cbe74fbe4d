"""Resumption in vLLM: sequences that continue after tokens of an earlier attempt.

To vLLM such a sequence is like a preempted request: it processes the output again together with the
prompt. Only a new request that starts in this state is unknown to vLLM. These parts of vLLM are
private, so this module fits one version of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from worker.engine.base import EngineRequest, SequenceOutput
from worker.engine.vllm.thinking_budget import is_bounded, reset_incomplete_character

_KEY = "sluice_output_token_ids"
_PHILOX_STEP = 4


def replayed_token_ids(request: EngineRequest) -> list[int]:
    """Return the earlier tokens if they must be sampled again.

    Mirostat's state depends on the surprise of every token, which requires the model's logits.
    """
    chain = request.sampling.chain
    has_state = chain is not None and chain.mirostat is not None and not request.sampling.is_greedy
    return request.output_token_ids if has_state else []


def output_arguments(request: EngineRequest) -> dict[str, Any]:
    """Return the part of a sequence's `SamplingParams.extra_args` with its earlier tokens."""
    if not request.output_token_ids or replayed_token_ids(request):
        return {}
    return {_KEY: request.output_token_ids}


def prepare_resumption() -> None:
    """Patch this vLLM process so that requests can start with output."""
    _begin_with_output()
    _begin_grammars_after_output()
    _separate_output_in_cpu_runner()


@dataclass(slots=True)
class _Resumed:
    prompt_tokens: int
    replayed_tokens: int
    """Tokens that remain to be sampled again."""


class ResumedSequences:
    """Removes output that an earlier attempt already produced."""

    def __init__(self) -> None:
        self._begun: dict[str, _Resumed] = {}

    def add(self, sequence_id: str, *, prompt_tokens: int, replayed_tokens: int) -> None:
        """Track a sequence until its first new token, which reports the prompt."""
        self._begun[sequence_id] = _Resumed(prompt_tokens, replayed_tokens)

    def remove(self, sequence_ids: Iterable[str]) -> None:
        """Stop tracking sequences; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            self._begun.pop(sequence_id, None)

    def own(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """Return the new outputs of one step."""
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
            # The statistics cover a prompt; vLLM asserts
            # that the cache holds no more tokens than that.
            request.prefill_stats = None
        return request

    Request.from_engine_core_request = from_engine_core_request


def _begin_grammars_after_output() -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    create = StructuredOutputManager._create_grammar

    def create_grammar(manager: Any, request: Any) -> Any:
        """Compile a grammar. Raises ValueError, which ends only this request."""
        grammar = create(manager, request)
        output = list(request.output_token_ids)
        for position, token_id in enumerate(output):
            if is_bounded(request):
                reset_incomplete_character(grammar, output[:position], token_id)
            if not grammar.accept_tokens(request.request_id, [token_id]):
                raise ValueError("earlier output does not match the grammar")
        return grammar

    StructuredOutputManager._create_grammar = create_grammar


def _separate_output_in_cpu_runner() -> None:
    """Make the CPU runner distinguish output from prompt; the GPU runner already does."""
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
    """Advance a seeded sequence's generator past the draws of its earlier tokens."""
    import torch

    if generator.device.type == "cpu":
        # `forward_cpu` of vLLM's TopKTopPSampler draws one number from this range for each token.
        torch.randint(0, 2**31, (tokens,), generator=generator)
    else:
        # The same offset by which vLLM itself rewinds a generator when it reverts a draw.
        generator.set_offset(generator.get_offset() + _PHILOX_STEP * tokens)

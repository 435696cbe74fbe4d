"""Conversion of requests into vLLM's sampling parameters."""

import copy
from typing import Any

from tokenizers import Tokenizer

from contract.sampling import SamplingSpec
from worker.engine.base import EngineRequest, InvalidRequestError
from worker.engine.vllm.arguments import MAX_BAD_WORD_TOKENS
from worker.engine.vllm.resumption import output_arguments, replayed_token_ids
from worker.samplers.arguments import chain_arguments, varied
from worker.samplers.breakers import DryBreakers

_PLAIN = (
    *("temperature", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    "repetition_penalty",
)
"""Parameters that vLLM has by the same names."""
_SMALLEST_TOP_P = 1e-6


class ParameterFactory:
    """Creates vLLM's sampling parameters. Its methods are called from several threads."""

    def __init__(
        self,
        types: Any,
        tokenizer_json: bytes,
        eos_token_ids: list[int],
        *,
        seeds_cost_time: bool,
    ) -> None:
        """Read the tokenizer.

        Args:
            types: The module `vllm.sampling_params`.
            tokenizer_json: The model's tokenizer.
            eos_token_ids: The end-of-text tokens.
            seeds_cost_time: Whether to sample without a seed unless a client requested one.
        """
        self._types = types
        self._seeds_cost_time = seeds_cost_time
        self._tokenizer = tokenizer = Tokenizer.from_buffer(tokenizer_json)
        self._breakers = DryBreakers(tokenizer)
        # The first call is slow, so make it before requests arrive.
        self._breakers.resolve(["\n"])
        new_line = tokenizer.encode("\n", add_special_tokens=False).ids
        self._special_token_ids = sorted({*eos_token_ids, *new_line})

    def make(self, request: EngineRequest, *, prompt_tokens: int, max_tokens: int) -> Any:
        """Return parameters of a job's first sequence. Raises InvalidRequestError or ValueError."""
        spec = request.sampling
        # vLLM's own sampler draws from the result of a chain.
        drawn = {"temperature": 0.0 if spec.is_greedy else 1.0}
        return self._types.SamplingParams(
            **(_plain(spec) if spec.chain is None else drawn),
            logit_bias=spec.logit_bias or None,
            allowed_token_ids=spec.allowed_token_ids or None,
            bad_words=spec.bad_words,
            thinking_token_budget=spec.thinking_budget,
            ignore_eos=spec.ignore_eos,
            min_tokens=min(spec.min_tokens, max_tokens),
            stop_token_ids=spec.stop_token_ids,
            repetition_detection=self._repetition(spec),
            seed=self._seed(request),
            max_tokens=max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            structured_outputs=self._types.StructuredOutputsParams(grammar=request.grammar)
            if request.grammar
            else None,
            skip_reading_prefix_cache=_skips_prefix_cache(request),
            extra_args=self._chain(request, prompt_tokens) | output_arguments(request) or None,
            detokenize=False,
            # They are used for this job only, so vLLM need not copy what they contain.
            skip_clone=True,
        )

    def vary(self, params: Any, request: EngineRequest) -> Any:
        """Derive a further sequence's parameters from those that vLLM made of the first one's."""
        params = copy.copy(params)
        params.seed = self._seed(request)
        params.prompt_logprobs = request.prompt_logprobs
        params.skip_reading_prefix_cache = _skips_prefix_cache(request)
        replayed = replayed_token_ids(request)
        chain = varied(params.extra_args, seed=request.seed, replayed=replayed)
        params.extra_args = chain | output_arguments(request) or None
        return params

    def forbid_words(self, params: Any) -> None:
        """Forbid bad words at the start of a word and inside one, in parameters that vLLM checked.

        vLLM allows a word after a space unless it has the same number of tokens there. Raises
        InvalidRequestError for more tokens than its GPU runner has room for.
        """
        if not params.bad_words:
            return
        words = [word.lstrip() for word in params.bad_words]
        forms = [form for word in words for form in (word, f" {word}")]
        ids = {tuple(self._tokenizer.encode(form, add_special_tokens=False).ids) for form in forms}
        tokens = sum(map(len, ids))
        if tokens > MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"'bad_words' must have at most {MAX_BAD_WORD_TOKENS} tokens together. "
                f"Given: {tokens}.",
                param="bad_words",
            )
        params._bad_words_token_ids = [list(each) for each in sorted(ids) if each]

    def _seed(self, request: EngineRequest) -> int | None:
        spec = request.sampling
        is_needed = not spec.is_greedy and (spec.is_seed_requested or not self._seeds_cost_time)
        return request.seed if is_needed else None

    def _repetition(self, spec: SamplingSpec) -> Any:
        detection = spec.repetition_detection
        if detection is None:
            return None
        return self._types.RepetitionDetectionParams(
            max_pattern_size=detection.max_pattern_size,
            min_pattern_size=detection.min_pattern_size,
            min_count=detection.min_count,
        )

    def _chain(self, request: EngineRequest, prompt_tokens: int) -> dict[str, Any]:
        spec = request.sampling
        if spec.chain is None:
            return {}
        dry = spec.chain.dry
        return chain_arguments(
            spec,
            seed=request.seed,
            prompt_tokens=prompt_tokens,
            breakers=[] if dry is None else self._breakers.resolve(dry.breakers),
            spared_token_ids=self._special_token_ids,
            replayed=replayed_token_ids(request),
            is_scored=request.logprobs is not None,
        )


def _skips_prefix_cache(request: EngineRequest) -> bool:
    # Tokens found in the cache are not scored.
    return request.prompt_logprobs is not None or not request.reads_prefix_cache


def _plain(spec: SamplingSpec) -> dict[str, Any]:
    values = {name: getattr(spec, name) for name in _PLAIN}
    return values | {"top_p": max(spec.top_p, _SMALLEST_TOP_P)}

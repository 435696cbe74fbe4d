"""Token ids in sampling parameters: resolve bias texts and check every id."""

import math
from collections.abc import Iterable, Sequence

import msgspec

from contract.sampling import MAX_LOGIT_BIAS_ENTRIES, SamplingSpec
from gateway.dialects.request import GenerationRequest
from gateway.errors import InvalidParameterError, must
from gateway.prompt.tokenizers import PromptEncoder


def resolve_sampling(
    request: GenerationRequest, encoder: PromptEncoder, *, eos_token_ids: Sequence[int]
) -> SamplingSpec:
    """Return the sampling spec with biases for texts resolved. Raises InvalidParameterError."""
    sampling = _with_texts(request, encoder)
    _check_end_may_come(request, sampling, eos_token_ids)
    return sampling


def _with_texts(request: GenerationRequest, encoder: PromptEncoder) -> SamplingSpec:
    sampling = request.sampling
    size = encoder.vocabulary_size
    _check("logit_bias", sampling.logit_bias, size)
    _check("allowed_token_ids", sampling.allowed_token_ids, size)
    _check("stop_token_ids", sampling.stop_token_ids, size)
    if not request.bias_texts:
        return sampling
    bias = _of_texts(request.bias_texts, encoder) | sampling.logit_bias
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise must("logit_bias", f"name at most {MAX_LOGIT_BIAS_ENTRIES} tokens", len(bias))
    return msgspec.structs.replace(sampling, logit_bias=bias)


def _check_end_may_come(
    request: GenerationRequest, sampling: SamplingSpec, eos_token_ids: Sequence[int]
) -> None:
    is_tool_forced = request.tool_use is not None and request.tool_use.is_constraint
    if request.structure is None and not is_tool_forced:
        return
    constraint = "tools" if request.structure is None else request.structure.param
    for token in eos_token_ids:
        if sampling.logit_bias.get(token) == -math.inf:
            raise InvalidParameterError(
                f"'logit_bias' must not forbid the end-of-text token {token} if '{constraint}' is "
                "given: constrained text ends with it.",
                param="logit_bias",
            )


def _of_texts(texts: dict[str, float], encoder: PromptEncoder) -> dict[int, float]:
    bias: dict[int, float] = {}
    for text, value in texts.items():
        bias |= dict.fromkeys(encoder.text_ids(text, adds_special_tokens=False), value)
    return bias


def _check(param: str, token_ids: Iterable[int], vocabulary_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocabulary_size:
            raise InvalidParameterError(
                f"'{param}' must have token ids from 0 to {vocabulary_size - 1}. Given: {token}.",
                param=param,
            )

"""Effective parameters of a request, by their names in the API."""

import math
from typing import Any, Final

from contract.sampling import SamplerChain, SamplingSpec
from gateway.dialects.request import GenerationRequest, PoolingKind, PoolingRequest

_NAMES: Final = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids", "allowed_token_ids"),
    "bad_words",
)
"""Parameters that a spec has by their own names."""
_MIROSTAT: Final = {
    "mirostat": "mirostat_version",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
_CHAIN: Final = {
    "repeat_last_n": "penalty_last_n",
    "dry_penalty_last_n": "dry_last_n",
    "dry_sequence_breakers": "dry_breakers",
    **{
        name: name
        for name in (
            *("typical_p", "top_n_sigma", "min_keep", "dynatemp_range", "dynatemp_exponent"),
            *("xtc_probability", "xtc_threshold"),
            *("dry_multiplier", "dry_base", "dry_allowed_length"),
        )
    },
}
"""Names in `SamplerChain.values` by parameter."""


def effective_parameters(request: GenerationRequest, sampling: SamplingSpec) -> dict[str, Any]:
    """Return every parameter that has an effect, with aliases resolved and defaults filled in."""
    if request.pooling is not None:
        return _of_pooling(request, request.pooling)
    parameters: dict[str, Any] = {
        "n": request.n,
        "context_length_exceeded_behavior": str(request.context_length_behavior),
        "stop": request.stop,
        "include_stop_str_in_output": request.includes_stop,
        "prompt_logprobs": request.prompt_logprobs,
        "stream": request.stream,
        "background": request.is_background,
        "cache_prompt": request.reads_prefix_cache,
        **_sampling(sampling),
    }
    if (chat := request.chat) is None:
        parameters |= _of_completions(request)
    else:
        parameters |= {
            "logprobs": request.logprobs is not None,
            "top_logprobs": request.logprobs or 0,
            "chat_template_kwargs": chat.template_arguments,
            "continue_final_message": chat.continues_last_message,
            "thinking_budget": sampling.thinking_budget,
            "include_reasoning": chat.shows_reasoning,
        }
    if request.structure is not None:
        parameters["structure"] = str(request.structure.kind)
    if request.tool_use is not None:
        parameters["tools"] = [tool.name for tool in request.tool_use.tools]
        parameters["parallel_tool_calls"] = request.tool_use.is_parallel
    if sampling.chain is not None:
        parameters |= chain_parameters(sampling.chain)
    return parameters


def _of_pooling(request: GenerationRequest, pooling: PoolingRequest) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "use_activation": pooling.is_activated,
        "add_special_tokens": request.adds_special_tokens,
        "truncate_prompt_tokens": request.prompt_tokens_kept,
        "truncation_side": "right" if request.keeps_prompt_start else "left",
    }
    if pooling.kind is PoolingKind.EMBEDDINGS:
        parameters["dimensions"] = pooling.dimensions
        parameters["encoding_format"] = "base64" if pooling.is_base64 else "float"
    if pooling.queries:
        parameters["max_tokens_per_query"] = pooling.most_query_tokens
        parameters["max_tokens_per_doc"] = pooling.most_document_tokens
        parameters["instruction"] = pooling.instruction
        parameters["chat_template_kwargs"] = pooling.template_arguments
    if pooling.kind is PoolingKind.RERANK:
        parameters["top_n"] = pooling.top_n
        parameters["return_documents"] = bool(pooling.documents)
    return parameters


def _of_completions(request: GenerationRequest) -> dict[str, Any]:
    suffix = {"suffix": request.suffix} if request.suffix else {}
    best_of, logprobs, echo = request.best_of, request.logprobs, request.echo
    return {"best_of": best_of, "logprobs": logprobs, "echo": echo, **suffix}


def _sampling(sampling: SamplingSpec) -> dict[str, Any]:
    bias = {str(token): value for token, value in sampling.logit_bias.items()}
    return {
        "seed": sampling.seed if sampling.is_seed_requested else None,
        **{name: getattr(sampling, name) for name in _NAMES},
        # JSON has no minus infinity; clients forbid a token with `false`.
        "logit_bias": {
            token: False if math.isinf(value) else value for token, value in bias.items()
        },
    }


def chain_parameters(chain: SamplerChain) -> dict[str, Any]:
    """Return the parameters of a sampler chain that have an effect."""
    values = chain.values()
    if chain.mirostat is not None:
        return {name: values[field] for name, field in _MIROSTAT.items()}
    parameters = {name: values[field] for name, field in _CHAIN.items() if field in values}
    return {"samplers": [str(sampler) for sampler in chain.order], **parameters}

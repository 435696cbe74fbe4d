"""Sampler chain arguments for vLLM's processes: one entry of `SamplingParams.extra_args`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from contract import sampling as ranges
from contract.sampling import Range, SamplerChain, SamplingSpec
from worker.samplers.parameters import SequenceChain

PROCESSOR = "worker.engine.vllm.chain_processor:ChainProcessor"
"""Value of vLLM's engine argument `logits_processors` that enables chains."""

_KEY = "sluice_chain"
_TOKEN_ID = Range(0, 2**31 - 1)
_BOUNDS = {
    **ranges.SAMPLING_RANGES,
    **ranges.CHAIN_RANGES,
    "xtc_probability": ranges.XTC_PROBABILITY,
    "xtc_threshold": ranges.XTC_THRESHOLD,
    "dry_multiplier": ranges.DRY_MULTIPLIER,
    "dry_base": ranges.DRY_BASE,
    "dry_allowed_length": ranges.DRY_ALLOWED_LENGTH,
    "dry_last_n": ranges.LAST_N,
    "mirostat_version": ranges.MIROSTAT,
    "mirostat_tau": ranges.MIROSTAT_TAU,
    "mirostat_eta": ranges.MIROSTAT_ETA,
    "prompt_tokens": Range(0, 2**31 - 1),
}


def chain_arguments(
    spec: SamplingSpec,
    *,
    seed: int,
    prompt_tokens: int,
    breakers: list[tuple[list[int], list[int]]],
    spared_token_ids: list[int],
    replayed: Sequence[int] = (),
    is_scored: bool = True,
) -> dict[str, Any]:
    """Return the `extra_args` of one sequence whose spec has a chain.

    Args:
        spec: The job's sampling parameters.
        seed: Seed of this sequence.
        prompt_tokens: Length of the prompt as the client sent it.
        breakers: DRY's breakers, as head tokens and the tail tokens that follow.
        spared_token_ids: Tokens that XTC never removes, if the spec spares any.
        replayed: The completion's first tokens, which are sampled again for mirostat.
        is_scored: Whether the engine reports log-probabilities of the sequence.
    """
    if spec.chain is None:
        raise ValueError("'spec' must have a chain.")
    parameters = SequenceChain(
        order=tuple(spec.chain.order),
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        repetition_penalty=spec.repetition_penalty,
        penalty_last_n=spec.chain.penalty_last_n,
        penalizes_prompt=spec.chain.penalizes_prompt,
        typical_p=spec.chain.typical_p,
        top_n_sigma=spec.chain.top_n_sigma,
        min_keep=spec.chain.min_keep,
        dynatemp_range=spec.chain.dynatemp_range,
        dynatemp_exponent=spec.chain.dynatemp_exponent,
        # Rows that no step reports would be mistaken for those of a later step.
        reports_probabilities=spec.chain.reports_probabilities and is_scored,
        seed=seed,
        prompt_tokens=prompt_tokens,
        replayed=tuple(replayed),
        **_xtc(spec.chain, spared_token_ids),
        **_dry(spec.chain, breakers),
        **_mirostat(spec.chain),
    )
    return {_KEY: msgspec.to_builtins(parameters)}


def varied(
    extra_args: Mapping[str, Any] | None, *, seed: int, replayed: Sequence[int]
) -> dict[str, Any]:
    """Return the chain as `extra_args` of another sequence of the same job; empty if none."""
    chain = (extra_args or {}).get(_KEY)
    if chain is None:
        return {}
    return {_KEY: chain | {"seed": seed, "replayed": list(replayed)}}


def chain_parameters(extra_args: Mapping[str, Any] | None) -> SequenceChain | None:
    """Return the chain that `chain_arguments` wrote, or None if there is none.

    Raises ValueError if it is malformed, so that no invalid chain reaches a batch.
    """
    arguments = (extra_args or {}).get(_KEY)
    if arguments is None:
        return None
    try:
        parameters = msgspec.convert(arguments, SequenceChain)
    except msgspec.ValidationError as error:
        raise ValueError(f"The sampler chain is malformed: {error}.") from None
    if unknown := sorted(set(arguments) - {field.name for field in fields(SequenceChain)}):
        raise ValueError(f"The sampler chain has no parameter {', '.join(unknown)}.")
    for name, bounds in _BOUNDS.items():
        _check(name, getattr(parameters, name), bounds)
    for token_id in _token_ids(parameters):
        _check("token id", token_id, _TOKEN_ID)
    return parameters


def _xtc(chain: SamplerChain, spared_token_ids: list[int]) -> dict[str, Any]:
    if chain.xtc is None:
        return {}
    return {
        "xtc_probability": chain.xtc.probability,
        "xtc_threshold": chain.xtc.threshold,
        "xtc_spared": tuple(spared_token_ids) if chain.xtc.spares_special else (),
    }


def _dry(chain: SamplerChain, breakers: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    if chain.dry is None:
        return {}
    return {
        "dry_multiplier": chain.dry.multiplier,
        "dry_base": chain.dry.base,
        "dry_allowed_length": chain.dry.allowed_length,
        "dry_last_n": chain.dry.last_n,
        "dry_breakers": tuple((tuple(heads), tuple(tail)) for heads, tail in breakers),
    }


def _mirostat(chain: SamplerChain) -> dict[str, Any]:
    if chain.mirostat is None:
        return {}
    return {
        "mirostat_version": chain.mirostat.version,
        "mirostat_tau": chain.mirostat.tau,
        "mirostat_eta": chain.mirostat.eta,
    }


def _check(name: str, value: float, bounds: Range) -> None:
    """Reject a value that is out of bounds or not a number."""
    if not bounds.minimum <= value <= bounds.maximum:
        raise ValueError(
            f"'{name}' of the sampler chain must be >= {bounds.minimum} and <= {bounds.maximum}."
            f" Given: {value}."
        )


def _token_ids(parameters: SequenceChain) -> Iterator[int]:
    yield from parameters.xtc_spared
    yield from parameters.replayed
    for heads, tail in parameters.dry_breakers:
        yield from heads
        yield from tail

"""Sampler chain arguments for vLLM's processes: one entry of `SamplingParams.extra_args`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from contract import sampling as ranges
from contract.sampling import Range, SamplingSpec
from worker.samplers.parameters import SequenceChain

PROCESSOR = "worker.engine.vllm.chain_processor:ChainProcessor"
"""Value of vLLM's engine argument `logits_processors` that enables chains."""

_KEY = "sluice_chain"
_TOKEN_ID = Range(0, 2**31 - 1)
_BOUNDS = {
    **ranges.SAMPLING_RANGES,
    **ranges.CHAIN_RANGES,
    "prompt_tokens": Range(0, 2**31 - 1),
}
_NAMES = frozenset(field.name for field in fields(SequenceChain))


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
    chain = spec.chain
    values = {
        **msgspec.structs.asdict(spec),
        **chain.values(),
        "order": tuple(chain.order),
        "xtc_spared": tuple(spared_token_ids) if chain.xtc and chain.xtc.spares_special else (),
        "dry_breakers": tuple((tuple(heads), tuple(tail)) for heads, tail in breakers)
        if chain.dry
        else (),
        # Rows that no step reports would be mistaken for those of a later step.
        "reports_probabilities": chain.reports_probabilities and is_scored,
        "seed": seed,
        "prompt_tokens": prompt_tokens,
        "replayed": tuple(replayed),
    }
    parameters = SequenceChain(**{name: values[name] for name in _NAMES & values.keys()})
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
    if unknown := sorted(set(arguments) - _NAMES):
        raise ValueError(f"The sampler chain has no parameter {', '.join(unknown)}.")
    for name, bounds in _BOUNDS.items():
        _check(name, getattr(parameters, name), bounds)
    for token_id in _token_ids(parameters):
        _check("token id", token_id, _TOKEN_ID)
    return parameters


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

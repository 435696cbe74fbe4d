"""Sampling parameters: temperature, truncation, penalties and seed."""

import os
from typing import Annotated

import msgspec

from contract import sampling
from contract.sampling import SamplingSpec
from gateway.dialects.fields import Parameters, agreed, bounded, given_or
from gateway.dialects.profile import Profile
from gateway.dialects.wire import INTEGRAL

RANDOM_SEED = -1
"""The seed value that means no seed."""

MINIMAL_TOP_P = 1e-6
"""Replaces top_p 0: so small that only the likeliest token remains."""


class SamplingParameters(Parameters):
    """Parameters that every engine supports."""

    temperature: Annotated[float, bounded(sampling.TEMPERATURE)] | None = None
    """Sampling temperature; 0 always selects the likeliest token. Default: 1; dialect llamacpp:
    0.8."""
    top_p: Annotated[float, bounded(sampling.TOP_P)] | None = None
    """Keep the likeliest tokens up to this probability mass; 0 keeps one. Default: 1; dialect
    llamacpp: 0.95."""
    top_k: Annotated[int, bounded(sampling.TOP_K), INTEGRAL] | None = None
    """Keep this many of the likeliest tokens; 0 and -1 keep all. Default: 0; dialect llamacpp:
    40."""
    min_p: Annotated[float, bounded(sampling.MIN_P)] | None = None
    """Keep tokens with at least this fraction of the likeliest token's probability. Default: 0;
    dialect llamacpp: 0.05."""
    seed: Annotated[int, bounded(sampling.SEED), INTEGRAL] | None = None
    """Makes sampling reproducible; choice `i` uses `seed + i`. -1 means no seed. Default: none."""
    presence_penalty: Annotated[float, bounded(sampling.PRESENCE_PENALTY)] | None = None
    """Subtracted from the logits of all tokens generated so far; dialect llamacpp also counts
    prompt tokens. Default: 0."""
    frequency_penalty: Annotated[float, bounded(sampling.FREQUENCY_PENALTY)] | None = None
    """Subtracted from a token's logit for each time it was generated; dialect llamacpp also counts
    prompt tokens. Default: 0."""
    repetition_penalty: Annotated[float, bounded(sampling.REPETITION_PENALTY)] | None = None
    """Divides the logits of tokens in prompt and completion; 1 is off. Default: 1; dialect
    llamacpp: 1.1."""
    repeat_penalty: Annotated[float, bounded(sampling.REPETITION_PENALTY)] | None = None
    """Another name of `repetition_penalty`."""


def read_plain_sampling(body: SamplingParameters, profile: Profile) -> SamplingSpec:
    """Return the sampling spec without a chain. Raises InvalidParameterError."""
    is_seed_requested = body.seed is not None and body.seed != RANDOM_SEED
    repetition = agreed(
        repetition_penalty=body.repetition_penalty, repeat_penalty=body.repeat_penalty
    )
    return SamplingSpec(
        seed=body.seed if body.seed is not None and is_seed_requested else new_seed(),
        is_seed_requested=is_seed_requested,
        temperature=given_or(body.temperature, profile.temperature),
        top_p=max(given_or(body.top_p, profile.top_p), MINIMAL_TOP_P),
        top_k=max(given_or(body.top_k, profile.top_k), 0),
        min_p=given_or(body.min_p, profile.min_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=given_or(repetition, profile.repetition_penalty),
    )


def new_seed() -> int:
    """Return the seed of a request that has none: 62 random bits."""
    return int.from_bytes(os.urandom(8)) >> 2


def truncates(spec: SamplingSpec) -> bool:
    """Return whether unlikely tokens are truncated."""
    return spec.top_k > 0 or spec.top_p < 1.0 or spec.min_p > 0.0


def penalizes(spec: SamplingSpec) -> bool:
    """Return whether tokens are penalized for earlier occurrences."""
    return spec.repetition_penalty != 1.0 or counts_tokens(spec)


def counts_tokens(spec: SamplingSpec) -> bool:
    """Return whether a penalty is on for which engines count only completion tokens."""
    return spec.presence_penalty != 0.0 or spec.frequency_penalty != 0.0


def without_penalties(spec: SamplingSpec) -> SamplingSpec:
    """Return `spec` without penalties."""
    return msgspec.structs.replace(
        spec, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0
    )


def without_truncation(spec: SamplingSpec) -> SamplingSpec:
    """Return `spec` without truncation."""
    return msgspec.structs.replace(spec, top_k=0, top_p=1.0, min_p=0.0)

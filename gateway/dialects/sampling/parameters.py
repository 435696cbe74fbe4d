"""Sampling parameters: temperature, truncation, penalties and seed; Mirostat, under either
llama.cpp's or Fireworks' names, but not both; and those that need llama.cpp's sampler chain.
"""

import math
import os
from typing import Annotated, Any

import msgspec
from pydantic import Field

from contract import sampling
from contract.sampling import (
    DEFAULT_SAMPLERS,
    MAX_DRY_BREAKER_CHARACTERS,
    MAX_DRY_BREAKERS,
    MIROSTAT,
    MIROSTAT_ETA,
    MIROSTAT_TAU,
    Mirostat,
    Sampler,
    SamplingSpec,
)
from gateway.dialects.fields import Parameters, agreed, bounded, given_or
from gateway.dialects.json_types import schema_of
from gateway.dialects.profile import MirostatUnit, Profile
from gateway.dialects.wire import INTEGRAL
from gateway.records.errors import invalid, shown

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


DEFAULT_TAU = 5.0
DEFAULT_ETA = 0.1
MAX_PERPLEXITY = 1e6

_VERSION_OF_TARGET = 2


class MirostatParameters(Parameters):
    """Sampling that keeps the surprise of the text near a target; it replaces truncation."""

    mirostat: Annotated[int, bounded(MIROSTAT), INTEGRAL] | None = None
    """Version of Mirostat; 0 is off. With it, truncation and penalties have no effect. Default:
    0."""
    mirostat_tau: Annotated[float, bounded(MIROSTAT_TAU)] | None = Field(
        default=None, description=f"Target surprise in bits per token. Default: {DEFAULT_TAU:g}."
    )
    mirostat_eta: Annotated[float, bounded(MIROSTAT_ETA)] | None = Field(
        default=None, description=f"Mirostat's learning rate. Default: {DEFAULT_ETA:g}."
    )
    mirostat_target: Annotated[float, Field(ge=0, le=MAX_PERPLEXITY)] | None = Field(
        default=None,
        description="Enables Mirostat 2 with this target perplexity (at least 1), in dialect "
        f"fireworks-2026 in bits per token (at most {MIROSTAT_TAU.maximum:g}). Cannot be combined "
        "with `mirostat`. Default: off.",
    )
    mirostat_lr: Annotated[float, bounded(MIROSTAT_ETA)] | None = Field(
        default=None,
        description="Learning rate for `mirostat_target`; no effect without it. "
        f"Default: {DEFAULT_ETA:g}.",
    )


def read_mirostat(body: MirostatParameters, profile: Profile) -> Mirostat | None:
    """Return the Mirostat targets, or None if it is off. Raises InvalidParameterError."""
    _check_families(body)
    if body.mirostat_target is not None:
        return Mirostat(
            version=_VERSION_OF_TARGET,
            tau=_tau_of(body.mirostat_target, profile.mirostat_unit),
            eta=given_or(body.mirostat_lr, DEFAULT_ETA),
        )
    if not body.mirostat:
        return None
    return Mirostat(
        version=body.mirostat,
        tau=given_or(body.mirostat_tau, DEFAULT_TAU),
        eta=given_or(body.mirostat_eta, DEFAULT_ETA),
    )


def _check_families(body: MirostatParameters) -> None:
    llamacpp = ("mirostat", "mirostat_tau", "mirostat_eta")
    fireworks = ("mirostat_target", "mirostat_lr")
    one = next((name for name in fireworks if getattr(body, name) is not None), None)
    other = next((name for name in llamacpp if getattr(body, name) is not None), None)
    if one is not None and other is not None:
        raise invalid(one, f"cannot be combined with '{other}': both configure Mirostat.")


def _tau_of(target: float, unit: MirostatUnit) -> float:
    if unit is MirostatUnit.PERPLEXITY:
        if target < 1.0:
            raise invalid(
                "mirostat_target", f"must be a perplexity of at least 1. Given: {target:g}."
            )
        return math.log2(target)
    if target > MIROSTAT_TAU.maximum:
        raise invalid(
            "mirostat_target", f"must be at most {MIROSTAT_TAU.maximum:g} bits. Given: {target:g}."
        )
    return target


DEFAULT_XTC_THRESHOLD = 0.1
MAX_ACTIVE_XTC_THRESHOLD = 0.5
"""Above it, XTC has no effect: no two tokens can be likely enough."""

DEFAULT_DRY_BASE = 1.75
DEFAULT_DRY_ALLOWED_LENGTH = 2
DEFAULT_DRY_BREAKERS = ["\n", ":", '"', "*"]

MAX_SAMPLERS = 32


def _sampler_names() -> dict[str, Sampler]:
    names = {"nucleus": Sampler.TOP_P, "typ": Sampler.TYPICAL_P, "temp": Sampler.TEMPERATURE}
    names |= {"typical_p": Sampler.TYPICAL_P, "typical": Sampler.TYPICAL_P}
    for sampler in Sampler:
        for separator in ("_", "-", ""):
            names[sampler.value.replace("_", separator)] = sampler
    return names


SAMPLER_NAMES = _sampler_names()
"""Sampler names that llama.cpp accepts, in lower case."""

SAMPLER_LETTERS = {
    "e": Sampler.PENALTIES,
    "d": Sampler.DRY,
    "s": Sampler.TOP_N_SIGMA,
    "k": Sampler.TOP_K,
    "y": Sampler.TYPICAL_P,
    "p": Sampler.TOP_P,
    "m": Sampler.MIN_P,
    "x": Sampler.XTC,
    "t": Sampler.TEMPERATURE,
}
"""llama.cpp's short form: one letter for each step."""


class ChainParameters(MirostatParameters, SamplingParameters):
    """Parameters of the sampler chain."""

    dynatemp_range: Annotated[float, bounded(sampling.DYNATEMP_RANGE)] | None = None
    """Range by which temperature varies with the model's uncertainty; 0 is off. Default: 0."""
    dynatemp_exponent: Annotated[float, bounded(sampling.DYNATEMP_EXPONENT)] | None = None
    """Exponent of the uncertainty in that temperature. Default: 1."""
    typical_p: Annotated[float, bounded(sampling.TYPICAL_P)] | None = None
    """Keep the most typical tokens up to this probability mass; 1 is off. Default: 1."""
    top_n_sigma: Annotated[float, bounded(sampling.TOP_N_SIGMA)] | None = None
    """Keep tokens whose logit is within this many standard deviations of the best; 0 and below are
    off. Default: -1."""
    min_keep: Annotated[int, bounded(sampling.MIN_KEEP), INTEGRAL] | None = None
    """Minimum tokens that truncation keeps. Default: 0."""
    repeat_last_n: Annotated[int, bounded(sampling.LAST_N), INTEGRAL] | None = None
    """Number of latest tokens that penalties count; 0: none, -1: all. Default: -1; dialect
    llamacpp: 64."""
    xtc_probability: Annotated[float, bounded(sampling.XTC_PROBABILITY)] | None = None
    """Probability with which XTC removes all likely tokens except the least likely of them.
    Default: 0."""
    xtc_threshold: Annotated[float, bounded(sampling.XTC_THRESHOLD)] | None = Field(
        default=None,
        description="Minimum probability of a token that XTC considers likely. Above 0.5, XTC is "
        f"off; dialect omlx rejects such values. Default: {DEFAULT_XTC_THRESHOLD:g}.",
    )
    dry_multiplier: Annotated[float, bounded(sampling.DRY_MULTIPLIER)] | None = None
    """Strength of DRY, a penalty on tokens that would continue a repetition; 0 is off. Default:
    0."""
    dry_base: Annotated[float, bounded(sampling.DRY_BASE)] | None = Field(
        default=None,
        description="Base of DRY's exponential growth; a value below 1 means the default. "
        f"Default: {DEFAULT_DRY_BASE:g}.",
    )
    dry_allowed_length: Annotated[int, bounded(sampling.DRY_ALLOWED_LENGTH), INTEGRAL] | None = (
        Field(
            default=None,
            description="Longest repetition, in tokens, that DRY does not penalize. "
            f"Default: {DEFAULT_DRY_ALLOWED_LENGTH}.",
        )
    )
    dry_penalty_last_n: Annotated[int, bounded(sampling.LAST_N), INTEGRAL] | None = None
    """Tokens that DRY searches for repetitions; 0: none, -1: all. Default: -1."""
    dry_sequence_breakers: Any = Field(
        default=None,
        description=f"Texts that end a repetition. Default: {shown(DEFAULT_DRY_BREAKERS)}.",
        json_schema_extra=schema_of(
            f"list[str[1:{MAX_DRY_BREAKER_CHARACTERS}], :{MAX_DRY_BREAKERS}] | None"
        ),
    )
    samplers: Any = Field(
        default=None,
        description="Steps of the chain in order; steps that are not listed are not applied. A "
        f"string lists them by letter ({', '.join(SAMPLER_LETTERS)}). "
        f"Default: {', '.join(DEFAULT_SAMPLERS)}.",
        json_schema_extra=schema_of(f"list[str, :{MAX_SAMPLERS}] | str | None"),
    )

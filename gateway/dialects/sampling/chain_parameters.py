"""Parameters that need llama.cpp's sampler chain."""

from typing import Annotated, Any

from pydantic import Field

from contract import sampling
from contract.sampling import (
    DEFAULT_SAMPLERS,
    MAX_DRY_BREAKER_CHARACTERS,
    MAX_DRY_BREAKERS,
    Sampler,
)
from gateway.dialects.fields import bounded
from gateway.dialects.json_types import schema_of
from gateway.dialects.sampling.mirostat import MirostatParameters
from gateway.dialects.sampling.parameters import SamplingParameters
from gateway.dialects.wire import INTEGRAL
from gateway.records.errors import shown

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

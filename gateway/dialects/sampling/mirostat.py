"""Mirostat parameters, under either llama.cpp's or Fireworks' names, but not both."""

import math
from typing import Annotated

from pydantic import Field

from contract.sampling import MIROSTAT, MIROSTAT_ETA, MIROSTAT_TAU, Mirostat
from gateway.dialects.fields import Parameters, bounded, given_or
from gateway.dialects.profile import MirostatUnit, Profile
from gateway.dialects.wire import INTEGRAL
from gateway.records.errors import invalid

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

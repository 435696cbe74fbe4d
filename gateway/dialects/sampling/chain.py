"""Sampler chain: decide whether a request needs llama.cpp's chain, and with which steps.

Most requests need nothing beyond the engine's own sampler. They get no chain and have no overhead.
"""

import msgspec

from contract.sampling import (
    DEFAULT_SAMPLERS,
    MAX_DRY_BREAKER_CHARACTERS,
    MAX_DRY_BREAKERS,
    Dry,
    Sampler,
    SamplerChain,
    SamplingSpec,
    Xtc,
)
from gateway.dialects.fields import given_or, read_list, read_strings
from gateway.dialects.profile import Profile
from gateway.dialects.sampling.parameters import (
    DEFAULT_DRY_ALLOWED_LENGTH,
    DEFAULT_DRY_BASE,
    DEFAULT_DRY_BREAKERS,
    DEFAULT_XTC_THRESHOLD,
    MAX_ACTIVE_XTC_THRESHOLD,
    MAX_SAMPLERS,
    SAMPLER_LETTERS,
    SAMPLER_NAMES,
    ChainParameters,
    counts_tokens,
    penalizes,
    read_mirostat,
    read_plain_sampling,
    truncates,
    without_penalties,
    without_truncation,
)
from gateway.records.errors import invalid, must, shown


def read_sampling(body: ChainParameters, profile: Profile) -> SamplingSpec:
    """Return the sampling spec, with a chain if necessary. Raises InvalidParameterError."""
    plain = read_plain_sampling(body, profile)
    order = _order(body.samplers)
    steps = _steps(body, profile, order)
    mirostat = read_mirostat(body, profile)
    if mirostat is not None and not plain.is_greedy:
        # As in llama.cpp: Mirostat samples from the whole distribution, scaled only by temperature.
        chain = SamplerChain(order=[Sampler.TEMPERATURE], mirostat=mirostat)
        return msgspec.structs.replace(without_truncation(without_penalties(plain)), chain=chain)
    if Sampler.PENALTIES not in order or steps.penalty_last_n == 0:
        plain = without_penalties(plain)
    if plain.is_greedy:
        return _greedy(plain, steps)
    if body.samplers is None and not _needs_chain(plain, steps, profile):
        return plain
    return msgspec.structs.replace(plain, chain=steps)


def with_reported_probabilities(spec: SamplingSpec, profile: Profile) -> SamplingSpec:
    """Return a spec whose log-probabilities are those after its samplers: it needs a chain."""
    # Without a chain, the penalties of a spec consider all tokens.
    chain = spec.chain or SamplerChain(
        order=list(DEFAULT_SAMPLERS), penalizes_prompt=profile.penalizes_prompt
    )
    chain = msgspec.structs.replace(chain, reports_probabilities=True)
    return msgspec.structs.replace(spec, chain=chain)


def _greedy(plain: SamplingSpec, steps: SamplerChain) -> SamplingSpec:
    """Keep only the parts of the chain that can change which token is the likeliest."""
    if steps.dry is None and not _penalizes_by_window(plain, steps):
        return plain
    chain = SamplerChain(
        order=steps.order,
        penalty_last_n=steps.penalty_last_n,
        penalizes_prompt=steps.penalizes_prompt,
        dry=steps.dry,
    )
    return msgspec.structs.replace(plain, chain=chain)


def _needs_chain(plain: SamplingSpec, steps: SamplerChain, profile: Profile) -> bool:
    return (
        (profile.uses_sampler_chain and (truncates(plain) or penalizes(plain)))
        or steps.xtc is not None
        or steps.dry is not None
        or steps.typical_p < 1.0
        or steps.top_n_sigma > 0.0
        or steps.dynatemp_range > 0.0
        or (steps.min_keep > 1 and truncates(plain))
        or _penalizes_by_window(plain, steps)
    )


def _penalizes_by_window(plain: SamplingSpec, steps: SamplerChain) -> bool:
    """Return whether penalties consider other tokens than an engine's own penalties do."""
    is_windowed = steps.penalty_last_n >= 0 and penalizes(plain)
    return is_windowed or (steps.penalizes_prompt and counts_tokens(plain))


def _steps(body: ChainParameters, profile: Profile, order: list[Sampler]) -> SamplerChain:
    return SamplerChain(
        order=order,
        penalty_last_n=given_or(body.repeat_last_n, profile.penalty_last_n),
        penalizes_prompt=profile.penalizes_prompt,
        typical_p=given_or(body.typical_p, 1.0),
        top_n_sigma=given_or(body.top_n_sigma, -1.0),
        min_keep=body.min_keep or 0,
        dynatemp_range=body.dynatemp_range or 0.0,
        dynatemp_exponent=given_or(body.dynatemp_exponent, 1.0),
        xtc=_xtc(body, profile, order),
        dry=_dry(body, order),
    )


def _xtc(body: ChainParameters, profile: Profile, order: list[Sampler]) -> Xtc | None:
    threshold = given_or(body.xtc_threshold, DEFAULT_XTC_THRESHOLD)
    if threshold > profile.most_xtc_threshold:
        raise invalid(
            "xtc_threshold",
            f"must be at most {profile.most_xtc_threshold:g}. Given: {threshold:g}.",
        )
    is_off = not body.xtc_probability or threshold > MAX_ACTIVE_XTC_THRESHOLD
    if is_off or Sampler.XTC not in order:
        return None
    return Xtc(
        probability=body.xtc_probability or 0.0,
        threshold=threshold,
        spares_special=profile.spares_special_tokens_in_xtc,
    )


def _dry(body: ChainParameters, order: list[Sampler]) -> Dry | None:
    breakers = DEFAULT_DRY_BREAKERS
    if body.dry_sequence_breakers is not None:
        breakers = read_strings(
            body.dry_sequence_breakers,
            "dry_sequence_breakers",
            most=MAX_DRY_BREAKERS,
            longest=MAX_DRY_BREAKER_CHARACTERS,
        )
    if not body.dry_multiplier or body.dry_penalty_last_n == 0 or Sampler.DRY not in order:
        return None
    base = given_or(body.dry_base, DEFAULT_DRY_BASE)
    return Dry(
        multiplier=body.dry_multiplier,
        base=DEFAULT_DRY_BASE if base < 1.0 else base,
        allowed_length=given_or(body.dry_allowed_length, DEFAULT_DRY_ALLOWED_LENGTH),
        last_n=given_or(body.dry_penalty_last_n, -1),
        breakers=breakers,
    )


def _order(value: object) -> list[Sampler]:
    if value is None:
        return list(DEFAULT_SAMPLERS)
    names, known = value, SAMPLER_NAMES
    if isinstance(value, str) and len(value) <= MAX_SAMPLERS:
        # llama.cpp also accepts a string with one letter for each step.
        names, known = list(value), SAMPLER_LETTERS
    order: list[Sampler] = []
    for name in read_list(names, "samplers", most=MAX_SAMPLERS):
        sampler = known.get(name.lower()) if isinstance(name, str) else None
        if sampler is None:
            raise must("samplers", f"contain only {', '.join(DEFAULT_SAMPLERS)}", name)
        if sampler in order:
            raise invalid(
                "samplers", f"must name each step at most once. Given: {shown(name)} twice."
            )
        order.append(sampler)
    return order

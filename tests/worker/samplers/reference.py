"""llama.cpp's samplers token by token, in float64: slow, and hard to get wrong.

Nothing here is shared with the tensors of `worker.samplers`: a list of candidates is filtered and
sorted as llama.cpp does it. Where llama.cpp leaves the order of equal logits open, the lower token
id goes first.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.sampling import Sampler
from worker.samplers.parameters import SequenceChain

Logits = NDArray[np.float64]


@dataclass(slots=True)
class Candidate:
    """A token that may still be sampled."""

    id: int
    logit: float
    p: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """The inputs of the steps besides the candidates."""

    parameters: SequenceChain
    tokens: Sequence[int]


def chain_logits(logits: Logits, parameters: SequenceChain, tokens: Sequence[int]) -> Logits:
    """The logits that a sequence samples from after `tokens` (prompt and completion)."""
    candidates = [Candidate(i, float(x)) for i, x in enumerate(logits) if x > -math.inf]
    for step in parameters.order:
        if parameters.temperature == 0 and step not in {Sampler.PENALTIES, Sampler.DRY}:
            continue
        if candidates:
            candidates = _STEPS[step](candidates, Request(parameters, tokens))
    final = np.full(len(logits), -math.inf)
    for candidate in candidates:
        final[candidate.id] = candidate.logit
    return final


def distribution(logits: Logits) -> Logits:
    """The probabilities of logits of which at least one is finite."""
    weights = np.exp(logits - logits.max())
    probabilities: Logits = weights / weights.sum()
    return probabilities


def draw(seed: int, position: int) -> float:
    """The number in [0, 1) that splitmix64 yields for a seed and a position."""
    mask = 2**64 - 1
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 11) / 2**53


def mirostat_probabilities(logits: Logits, parameters: SequenceChain, mu: float) -> Logits:
    """The probabilities that a sequence samples from in mirostat's state `mu`."""
    candidates = [
        Candidate(i, float(x) / parameters.temperature)
        for i, x in enumerate(logits)
        if x > -math.inf
    ]
    ranked = _softmax_sorted(candidates)
    if parameters.mirostat_version == 1:
        kept = ranked[: _mirostat_k(ranked, len(logits), mu)]
    else:
        kept = [c for c in ranked if -math.log2(c.p) <= mu] if mu >= 0 else []
    probabilities = np.zeros(len(logits))
    for candidate in _softmax_sorted(kept or ranked[:1]):
        probabilities[candidate.id] = candidate.p
    return probabilities


def _mirostat_k(ranked: Sequence[Candidate], vocab_size: int, mu: float) -> int:
    products = squares = 0.0
    for i in range(min(99, len(ranked) - 1)):
        distance = math.log((i + 2) / (i + 1))
        products += distance * math.log(ranked[i].p / ranked[i + 1].p)
        squares += distance * distance
    if products == 0:
        return 1 if 2**mu < vocab_size - 1 else vocab_size
    exponent = products / squares
    epsilon = exponent - 1
    k = ((epsilon * 2**mu) / (1 - vocab_size**-epsilon)) ** (1 / exponent)
    return max(int(min(k, vocab_size)), 1)


def _softmax(candidates: Sequence[Candidate]) -> None:
    largest = max(c.logit for c in candidates)
    total = sum(math.exp(c.logit - largest) for c in candidates)
    for c in candidates:
        c.p = math.exp(c.logit - largest) / total


def _sorted(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda c: (-c.logit, c.id))


def _softmax_sorted(candidates: Sequence[Candidate]) -> list[Candidate]:
    _softmax(candidates)
    return _sorted(candidates)


def _entropy(candidates: Sequence[Candidate]) -> float:
    return -sum(c.p * math.log(c.p) for c in candidates if c.p > 0)


def _penalties(candidates: list[Candidate], request: Request) -> list[Candidate]:
    parameters, tokens = request.parameters, list(request.tokens)
    last_n = parameters.penalty_last_n
    start = 0 if last_n < 0 else max(len(tokens) - last_n, 0)
    window = list(enumerate(tokens))[start:]
    for c in candidates:
        positions = [position for position, token in window if token == c.id]
        if positions:
            r = parameters.repetition_penalty
            c.logit = c.logit * r if c.logit <= 0 else c.logit / r
        if not parameters.penalizes_prompt:
            positions = [p for p in positions if p >= parameters.prompt_tokens]
        if positions:
            c.logit -= len(positions) * parameters.frequency_penalty + parameters.presence_penalty
    return candidates


def dry_penalties(parameters: SequenceChain, tokens: Sequence[int]) -> dict[int, float]:
    """The DRY penalty of each token's logit."""
    off = parameters.dry_multiplier == 0 or parameters.dry_base < 1 or parameters.dry_last_n == 0
    if off:
        return {}
    window = list(tokens if parameters.dry_last_n < 0 else tokens[-parameters.dry_last_n :])
    if len(window) <= parameters.dry_allowed_length:
        return {}
    limit = _breaker_limit(parameters, window)
    if limit < parameters.dry_allowed_length:
        return {}
    longest: dict[int, int] = {}
    for end in range(len(window) - 1):
        length = 0
        while length <= end and window[end - length] == window[-1 - length]:
            length += 1
        length = min(length, limit)
        if length >= parameters.dry_allowed_length:
            follower = window[end + 1]
            longest[follower] = max(longest.get(follower, 0), length)
    singles = {head for heads, tail in parameters.dry_breakers if not tail for head in heads}
    return {
        token: parameters.dry_multiplier * _power(parameters, length)
        for token, length in longest.items()
        if token not in singles
    }


def _power(parameters: SequenceChain, length: int) -> float:
    exponent = length - parameters.dry_allowed_length
    if parameters.dry_base > 1.000001:
        exponent = min(exponent, int(88.7228391 / math.log(parameters.dry_base)))
    return float(parameters.dry_base**exponent)


def _breaker_limit(parameters: SequenceChain, window: Sequence[int]) -> int:
    for age in range(len(window)):
        position = len(window) - 1 - age
        tails = [
            len(tail)
            for heads, tail in parameters.dry_breakers
            if window[position] in heads
            and tuple(window[position + 1 : position + 1 + len(tail)]) == tail
        ]
        if tails:
            return age - max(tails)
    return len(window)


def _dry(candidates: list[Candidate], request: Request) -> list[Candidate]:
    penalties = dry_penalties(request.parameters, request.tokens)
    for c in candidates:
        c.logit -= penalties.get(c.id, 0.0)
    return candidates


def _top_n_sigma(candidates: list[Candidate], request: Request) -> list[Candidate]:
    n = request.parameters.top_n_sigma
    if n <= 0 or len(candidates) <= 1:
        return candidates
    mean = sum(c.logit for c in candidates) / len(candidates)
    deviation = math.sqrt(sum((c.logit - mean) ** 2 for c in candidates) / len(candidates))
    largest = max(c.logit for c in candidates)
    return [c for c in candidates if c.logit >= largest - n * deviation]


def _top_k(candidates: list[Candidate], request: Request) -> list[Candidate]:
    k = request.parameters.top_k
    if k <= 0:
        return candidates
    return _sorted(candidates)[: max(k, request.parameters.min_keep)]


def _typical_p(candidates: list[Candidate], request: Request) -> list[Candidate]:
    parameters = request.parameters
    if parameters.typical_p >= 1:
        return candidates
    candidates = _softmax_sorted(candidates)
    entropy = _entropy(candidates)
    by_distance = sorted(
        candidates, key=lambda c: abs(-math.log(c.p) - entropy) if c.p > 0 else math.inf
    )
    total = 0.0
    for i, c in enumerate(by_distance):
        total += c.p
        if total > parameters.typical_p and i >= parameters.min_keep - 1:
            return by_distance[: i + 1]
    return by_distance


def _top_p(candidates: list[Candidate], request: Request) -> list[Candidate]:
    parameters = request.parameters
    if parameters.top_p >= 1:
        return candidates
    candidates = _softmax_sorted(candidates)
    total = 0.0
    for i, c in enumerate(candidates):
        total += c.p
        if total >= parameters.top_p and i + 1 >= parameters.min_keep:
            return candidates[: i + 1]
    return candidates


def _min_p(candidates: list[Candidate], request: Request) -> list[Candidate]:
    parameters = request.parameters
    if parameters.min_p <= 0:
        return candidates
    candidates = _sorted(candidates)
    lowest = candidates[0].logit + math.log(parameters.min_p)
    count = 1
    while count < len(candidates):
        if candidates[count].logit < lowest and count >= parameters.min_keep:
            break
        count += 1
    return candidates[:count]


def _xtc(candidates: list[Candidate], request: Request) -> list[Candidate]:
    parameters = request.parameters
    if parameters.xtc_probability <= 0 or parameters.xtc_threshold > 0.5 or len(candidates) < 2:
        return candidates
    if draw(parameters.seed, len(request.tokens)) > parameters.xtc_probability:
        return candidates
    candidates = _softmax_sorted(candidates)
    last = 0
    for i, c in enumerate(candidates):
        if c.p < parameters.xtc_threshold:
            break
        last = i
    if last == 0 or len(candidates) - last < parameters.min_keep:
        return candidates
    spared = [c for c in candidates[:last] if c.id in parameters.xtc_spared]
    return spared + candidates[last:]


def _temperature(candidates: list[Candidate], request: Request) -> list[Candidate]:
    parameters = request.parameters
    temperature = parameters.temperature
    if parameters.dynatemp_range > 0 and len(candidates) > 1:
        _softmax(candidates)
        share = _entropy(candidates) / math.log(len(candidates))
        low = max(0.0, temperature - parameters.dynatemp_range)
        high = temperature + parameters.dynatemp_range
        temperature = low + (high - low) * share**parameters.dynatemp_exponent
    if temperature <= 0:
        return _sorted(candidates)[:1]
    for c in candidates:
        c.logit /= temperature
    return candidates


_STEPS: dict[Sampler, Callable[[list[Candidate], Request], list[Candidate]]] = {
    Sampler.PENALTIES: _penalties,
    Sampler.DRY: _dry,
    Sampler.TOP_N_SIGMA: _top_n_sigma,
    Sampler.TOP_K: _top_k,
    Sampler.TYPICAL_P: _typical_p,
    Sampler.TOP_P: _top_p,
    Sampler.MIN_P: _min_p,
    Sampler.XTC: _xtc,
    Sampler.TEMPERATURE: _temperature,
}

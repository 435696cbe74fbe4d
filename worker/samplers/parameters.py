"""Sampler chain parameters of one sequence: plain numbers, without tensors."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

from contract.sampling import DEFAULT_SAMPLERS, Sampler

Breaker = tuple[tuple[int, ...], tuple[int, ...]]
"""Head tokens, any of which begins the breaker, and the tail tokens that must follow."""

LONGEST_TAIL = 20
"""Number of tail tokens of a breaker that are compared; llama.cpp has the same limit."""

ALL_TOKENS = -1
RANKED_TOKENS = (128, 512, 2048)
"""Sizes of a partial sort, so that sequences with a similar top_k share a group."""
TIED_TOKENS = 64
"""Tokens ranked beyond top_k: of this many with equal logits at its edge, lower ids are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceChain:
    """The chain of one sequence. Defaults change nothing; the contract defines the meanings.

    At temperature 0 (greedy) only the penalties and DRY apply. Mirostat replaces every step except
    the temperature.
    """

    order: tuple[Sampler, ...] = DEFAULT_SAMPLERS
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    penalty_last_n: int = -1
    penalizes_prompt: bool = True
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    min_keep: int = 0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_spared: tuple[int, ...] = ()
    """Tokens that XTC never removes."""
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_last_n: int = -1
    dry_breakers: tuple[Breaker, ...] = ()
    mirostat_version: int = 0
    """1 or 2; 0 is off."""
    mirostat_tau: float = 5.0
    """Target surprise in bits per token."""
    mirostat_eta: float = 0.1
    reports_probabilities: bool = False
    """Whether vLLM reports log-probabilities of the chain's result."""
    seed: int = 0
    """Seed of this sequence (not of its job)."""
    prompt_tokens: int = 0
    """Length of the prompt as the client sent it; later tokens were generated."""
    replayed: tuple[int, ...] = ()
    """The completion's first tokens, which are sampled again to restore mirostat's state."""

    def __post_init__(self) -> None:
        # Make equal breakers one object: a batch then need not compare thousands of token ids.
        object.__setattr__(self, "dry_breakers", _shared(self.dry_breakers))

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken, so that only penalties and DRY apply."""
        return self.temperature == 0.0

    @property
    def uses_mirostat(self) -> bool:
        """Whether mirostat replaces the chain."""
        return self.mirostat_version != 0 and not self.is_greedy

    @property
    def initial_mu(self) -> float:
        """Mirostat's state before the first token, in bits."""
        return 2.0 * self.mirostat_tau

    @property
    def history_needed(self) -> int:
        """Newest tokens of prompt and completion that the chain reads; -1 for all of them."""
        windows = [0]
        if self.uses(Sampler.PENALTIES):
            windows.append(self.penalty_last_n)
        if self.uses(Sampler.DRY):
            windows.append(self.dry_last_n)
        return -1 if min(windows) < 0 else max(windows)

    @property
    def ranked_tokens(self) -> int:
        """How many of the most probable tokens must be sorted; 0: none, -1: all."""
        for step in self.order:
            if step is Sampler.TOP_K and self.uses(step):
                needed = max(self.top_k, self.min_keep) + TIED_TOKENS
                return next((width for width in RANKED_TOKENS if needed <= width), ALL_TOKENS)
            ranks = step is Sampler.TOP_P or (step is Sampler.MIN_P and self.min_keep > 1)
            if ranks and self.uses(step):
                return ALL_TOKENS
        return 0

    @property
    def group(self) -> Hashable:
        """Sequences with equal groups can share the same `Rows`."""
        if self.uses_mirostat:
            return self.mirostat_version
        return (self.order, self.ranked_tokens)

    def uses(self, step: Sampler) -> bool:
        """Whether the step is in the order and changes anything."""
        if step not in self.order or self.uses_mirostat:
            return False
        if step is Sampler.PENALTIES:
            return self.penalty_last_n != 0 and (
                self.presence_penalty != 0.0
                or self.frequency_penalty != 0.0
                or self.repetition_penalty != 1.0
            )
        if step is Sampler.DRY:
            # As in llama.cpp, a base below 1 disables DRY.
            return self.dry_multiplier != 0.0 and self.dry_base >= 1.0 and self.dry_last_n != 0
        return not self.is_greedy and self._truncates(step)

    def _truncates(self, step: Sampler) -> bool:
        return {
            Sampler.TOP_N_SIGMA: self.top_n_sigma > 0.0,
            Sampler.TOP_K: self.top_k > 0,
            Sampler.TYPICAL_P: self.typical_p < 1.0,
            Sampler.TOP_P: self.top_p < 1.0,
            Sampler.MIN_P: self.min_p > 0.0,
            # As in llama.cpp, a threshold above a half disables XTC.
            Sampler.XTC: self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5,
            Sampler.TEMPERATURE: self.temperature != 1.0 or self.dynatemp_range > 0.0,
        }[step]


@lru_cache(maxsize=256)
def _shared(breakers: tuple[Breaker, ...]) -> tuple[Breaker, ...]:
    return breakers

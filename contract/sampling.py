"""Sampling parameters in engine-neutral form, and their valid ranges.

The ranges are the union of those that the served APIs document and those that vLLM 0.32 accepts.
The gateway validates requests against them and documents them; the worker relies on them.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec


class Range(NamedTuple):
    """Inclusive bounds of a numeric parameter."""

    minimum: float
    maximum: float


TEMPERATURE = Range(0.0, 2.0)
TOP_P = Range(0.0, 1.0)
TOP_K = Range(-1, 2**31 - 1)
MIN_P = Range(0.0, 1.0)
PRESENCE_PENALTY = Range(-2.0, 2.0)
FREQUENCY_PENALTY = Range(-2.0, 2.0)
REPETITION_PENALTY = Range(0.01, 2.0)
LOGIT_BIAS = Range(-100.0, 100.0)
SEED = Range(-(2**63), 2**63 - 1)
N = Range(1, 128)
LOGPROBS = Range(0, 20)
MIN_TOKENS = Range(0, 2**31 - 1)
THINKING_BUDGET = Range(0, 2**31 - 1)

TYPICAL_P = Range(0.0, 1.0)
TOP_N_SIGMA = Range(-1.0, 1000.0)
MIN_KEEP = Range(0, 2**31 - 1)
DYNATEMP_RANGE = Range(0.0, 2.0)
DYNATEMP_EXPONENT = Range(0.01, 100.0)
LAST_N = Range(-1, 2**31 - 1)
"""Windows of penalties and of DRY, in tokens; -1 is the whole context and 0 disables them."""
MIROSTAT = Range(0, 2)
MIROSTAT_TAU = Range(0.0, 100.0)
MIROSTAT_ETA = Range(0.0, 10.0)
XTC_PROBABILITY = Range(0.0, 1.0)
XTC_THRESHOLD = Range(0.0, 1.0)
DRY_MULTIPLIER = Range(0.0, 1000.0)
DRY_BASE = Range(0.0, 1000.0)
DRY_ALLOWED_LENGTH = Range(0, 2**31 - 1)

SAMPLING_RANGES: Mapping[str, Range] = {
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "top_k": TOP_K,
    "min_p": MIN_P,
    "presence_penalty": PRESENCE_PENALTY,
    "frequency_penalty": FREQUENCY_PENALTY,
    "repetition_penalty": REPETITION_PENALTY,
    "seed": SEED,
}
"""Ranges by field of `SamplingSpec`."""

CHAIN_RANGES: Mapping[str, Range] = {
    "penalty_last_n": LAST_N,
    "typical_p": TYPICAL_P,
    "top_n_sigma": TOP_N_SIGMA,
    "min_keep": MIN_KEEP,
    "dynatemp_range": DYNATEMP_RANGE,
    "dynatemp_exponent": DYNATEMP_EXPONENT,
    "xtc_probability": XTC_PROBABILITY,
    "xtc_threshold": XTC_THRESHOLD,
    "dry_multiplier": DRY_MULTIPLIER,
    "dry_base": DRY_BASE,
    "dry_allowed_length": DRY_ALLOWED_LENGTH,
    "dry_last_n": LAST_N,
    "mirostat_version": MIROSTAT,
    "mirostat_tau": MIROSTAT_TAU,
    "mirostat_eta": MIROSTAT_ETA,
}
"""Ranges by name in `SamplerChain.values`."""

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 512
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128
MAX_DRY_BREAKERS = 16
MAX_DRY_BREAKER_CHARACTERS = 40


class Sampler(StrEnum):
    """Steps of llama.cpp's sampler chain, named as in its parameter `samplers`."""

    PENALTIES = "penalties"
    DRY = "dry"
    TOP_N_SIGMA = "top_n_sigma"
    TOP_K = "top_k"
    TYPICAL_P = "typ_p"
    TOP_P = "top_p"
    MIN_P = "min_p"
    XTC = "xtc"
    TEMPERATURE = "temperature"


DEFAULT_SAMPLERS = tuple(Sampler)
"""llama.cpp's default order."""


class Mirostat(msgspec.Struct, frozen=True):
    """Mirostat sampling, which replaces every step of the chain except temperature."""

    version: int
    """1 or 2."""
    tau: float
    """Target surprise in bits per token."""
    eta: float
    """Learning rate."""


class Dry(msgspec.Struct, frozen=True):
    """DRY: a penalty on tokens that would continue a repetition."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    """Number of last tokens of prompt and completion to search for repetitions; -1 searches all."""
    breakers: list[str]
    """Texts across which no repetition extends."""


class Xtc(msgspec.Struct, frozen=True):
    """XTC: with a given probability, remove all likely tokens except the least likely of them."""

    probability: float
    threshold: float
    spares_special: bool = False
    """Whether the end-of-text and newline tokens are never removed (as in oMLX)."""


class SamplerChain(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling that vLLM's own sampler does not support. All steps run in the order of the chain.

    Temperature, top_k, top_p, min_p and the three penalties are those of the `SamplingSpec`.
    """

    order: list[Sampler]
    """Steps in the order in which they are applied; other steps are not applied."""
    penalty_last_n: int = -1
    """Number of newest tokens that all three penalties consider; -1: all, 0: none."""
    penalizes_prompt: bool = True
    """Whether presence and frequency penalties count tokens of the prompt, as llama.cpp does. The
    repetition penalty always does."""
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    min_keep: int = 0
    """Least number of tokens that top_k, typical_p, top_p, min_p and XTC keep."""
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    xtc: Xtc | None = None
    dry: Dry | None = None
    mirostat: Mirostat | None = None
    reports_probabilities: bool = False
    """Whether log-probabilities are those of the chain's result, not of the model."""

    def values(self) -> dict[str, Any]:
        """Return the fields by name, and those of its parts by names such as `xtc_threshold`."""
        values = msgspec.structs.asdict(self)
        for name in ("xtc", "dry", "mirostat"):
            if (part := values.pop(name)) is not None:
                fields = msgspec.structs.asdict(part)
                values |= {f"{name}_{field}": value for field, value in fields.items()}
        return values


class RepetitionDetection(msgspec.Struct, frozen=True):
    """Ends a sequence that repeats itself (vLLM's `repetition_detection`)."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


class SamplingSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the sequences of one job are sampled.

    Defaults are neutral: a spec with only a seed samples from the model's own distribution.
    """

    seed: int
    """Base seed of the job; sequence `j` samples with `seed + j`."""
    is_seed_requested: bool = True
    """Whether the client sent the seed. If not, an engine may sample without seed to save time."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens to keep; 0 keeps all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    """Added to logits; minus infinity forbids a token."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """Completion tokens before an end-of-text or stop token is allowed."""
    stop_token_ids: list[int] = []
    allowed_token_ids: list[int] = []
    """The only allowed tokens; empty allows all."""
    bad_words: list[str] = []
    """Forbidden words, whether at the start of a word or inside one."""
    repetition_detection: RepetitionDetection | None = None
    chain: SamplerChain | None = None
    thinking_budget: int | None = None
    """Reasoning tokens after which the end of reasoning is forced; None sets no limit."""

    @property
    def is_greedy(self) -> bool:
        """Whether all sequences would be equal."""
        return self.temperature == 0.0

    @property
    def bans(self) -> dict[str, object]:
        """The parameters that forbid tokens, with their values; of `logit_bias`, the tokens."""
        found: dict[str, object] = {
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": self.bad_words,
            "logit_bias": [each for each, bias in self.logit_bias.items() if bias == -math.inf],
            "min_tokens": self.min_tokens,
        }
        return {name: value for name, value in found.items() if value}

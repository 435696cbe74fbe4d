"""Sampling parameters in engine-neutral form, and the ranges in which they are legal.

The ranges are the union of what the served APIs document and what vLLM 0.32 accepts. The gateway
validates against them and documents them; the worker relies on them.
"""

from typing import NamedTuple

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
LOGPROBS = Range(0, 5)

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 512
MAX_LOGIT_BIAS_ENTRIES = 1024


class SamplingSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the sequences of one job are sampled.

    Defaults are neutral: a spec with only a seed samples from the model's own distribution.
    """

    seed: int
    """Base seed of the job; sequence `j` samples with `seed + j`."""
    is_seed_requested: bool = True
    """Whether the client gave the seed. If not, an engine may sample without one where seeds cost it time."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of most probable tokens kept; 0 keeps all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether every sequence would come out the same."""
        return self.temperature == 0.0

"""DRY, "don't repeat yourself": a penalty on tokens that would continue a repetition.

As in llama.cpp: if the newest tokens also occur earlier in the window, the token that followed
there is penalized by `multiplier * base ** (length - allowed_length)`, provided that the longest
match has at least the allowed length. No match extends back across a breaker, and a token that is
a breaker by itself is never penalized.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from contract.sampling import Sampler
from worker.samplers.candidates import Candidates, Context, Placement
from worker.samplers.parameters import SequenceChain
from worker.samplers.stages.dry_breakers import BreakerRows
from worker.samplers.stages.penalties import Window

LONGEST_MATCH = 64
"""Longer matches count as this long, which bounds the work of a step."""
LARGEST_PENALTY = 1e12
"""Larger penalties are reduced to this one, so that sums of squares of logits stay finite."""
_LARGEST_LOG = 88.7228391
"""llama.cpp's bound on exponents: the logarithm of the largest float32."""
_NO_MATCH = -1
_NO_TOKEN = -2
"""Differs from the -1 in empty places, so that the two never match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryStage:
    """The parameters of DRY; rows that do not use it have an empty window."""

    multiplier: Tensor
    base: Tensor
    allowed_length: Tensor
    largest_exponent: Tensor
    window: Window
    breakers: BreakerRows | None
    """None if no row has any."""

    @classmethod
    def build(cls, parameters: Sequence[SequenceChain], placement: Placement) -> Self:
        """Copy the parameters to the device."""
        used = [row.uses(Sampler.DRY) for row in parameters]
        lengths = [row.dry_last_n if on else 0 for row, on in zip(parameters, used, strict=True)]
        bases = [row.dry_base if on else 1.0 for row, on in zip(parameters, used, strict=True)]
        has_breakers = any(row.dry_breakers for row in parameters)
        return cls(
            multiplier=placement.floats([row.dry_multiplier for row in parameters]),
            base=placement.floats(bases),
            allowed_length=placement.integers([row.dry_allowed_length for row in parameters]),
            largest_exponent=placement.integers([_largest_exponent(base) for base in bases]),
            window=Window.build(lengths, placement),
            breakers=BreakerRows.build(parameters, placement) if has_breakers else None,
        )

    def apply(self, candidates: Candidates, context: Context) -> None:
        """Penalize the tokens that followed earlier matches."""
        tokens = self.window.newest(context.history)
        if tokens.shape[1] < 2:
            return
        logits = candidates.by_token()
        followers, matches = tokens[:, 1:], self._matches(tokens)
        present = (followers >= 0) & (followers < logits.shape[1])
        # Columns without a token point at token 0 and compute its own penalty again.
        ids = followers.where(present, 0)
        longest = logits.new_full(logits.shape, _NO_MATCH, dtype=torch.int32)
        longest.scatter_reduce_(1, ids, matches.where(present, _NO_MATCH), "amax")
        penalties = self._penalties(longest.gather(1, ids))
        if self.breakers is not None:
            penalties.masked_fill_(self.breakers.is_single(ids), 0.0)
        logits.scatter_(1, ids, logits.gather(1, ids) - penalties)

    def _matches(self, tokens: Tensor) -> Tensor:
        """For each column but the last: length of the match that ends there, or -1 if too short."""
        lengths = _common_suffixes(tokens)
        size = (tokens >= 0).sum(-1, keepdim=True)
        limit = size if self.breakers is None else size.minimum(self.breakers.limits(tokens))
        lengths = lengths.minimum(limit.to(lengths.dtype))
        acts = (lengths >= self.allowed_length) & (tokens[:, :-1] >= 0)
        return lengths.where(acts & (size > self.allowed_length), _NO_MATCH)

    def _penalties(self, longest: Tensor) -> Tensor:
        exponent = (longest - self.allowed_length).minimum(self.largest_exponent).clamp_(min=0)
        penalties = (self.multiplier * self.base**exponent).clamp_(max=LARGEST_PENALTY)
        return penalties.masked_fill_(longest < 0, 0.0)


def _largest_exponent(base: float) -> int:
    """Return the exponent above which powers of the base exceed the range of float32."""
    return int(_LARGEST_LOG / math.log(base)) if base > 1.000001 else LONGEST_MATCH


def _common_suffixes(tokens: Tensor) -> Tensor:
    """For each column but the last: how many tokens up to it equal the newest ones."""
    width = tokens.shape[1]
    tokens = tokens.to(torch.int32)
    newest = tokens.where(tokens >= 0, _NO_TOKEN)
    # Small types: this loop dominates the cost of DRY. LONGEST_MATCH fits into a byte.
    lengths = torch.zeros_like(tokens[:, 1:], dtype=torch.uint8)
    alive = torch.ones_like(lengths, dtype=torch.bool)
    for depth in range(min(LONGEST_MATCH, width - 1)):
        # Each column compares the token `depth` before it;
        # columns further left have no more tokens.
        columns = alive[:, depth:]
        columns &= tokens[:, : width - 1 - depth] == newest[:, width - 1 - depth : width - depth]
        lengths[:, depth:] += columns
    return lengths.to(torch.int32)

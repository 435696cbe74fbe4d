"""DRY, "don't repeat yourself": a penalty on tokens that would continue a repetition.

As in llama.cpp: if the newest tokens also occur earlier in the window, the token that followed
there is penalized by `multiplier * base ** (length - allowed_length)`, provided that the longest
match has at least the allowed length. No match extends back across a breaker, and a token that is
a breaker by itself is never penalized.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from contract.sampling import Sampler
from worker.samplers.candidates import Candidates, Context, Placement
from worker.samplers.parameters import LONGEST_TAIL, Breaker, SequenceChain
from worker.samplers.stages.penalties import Window

_SEARCHED_TOKENS = 64 + LONGEST_TAIL
"""Number of newest tokens to search: a more distant breaker limits no match of 64 tokens."""
_NO_LIMIT = 2**31 - 1
_NO_KEY = 2**62
_PATTERNS = 2**20
_ANY_TOKEN = -1
_NO_TOKEN = -2


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRows:
    """The breakers of all rows."""

    singles: Tensor
    """[sets, vocabulary]: whether a token is a breaker by itself."""
    set_of_row: Tensor
    tails: Tensor
    """[rows, patterns, tail]: tail tokens, padded with -1."""
    keys: Tensor
    """[rows, keys]: sorted `head * 2**20 + pattern`, padded with a key that never occurs."""

    @classmethod
    def build(cls, parameters: Sequence[SequenceChain], placement: Placement) -> Self:
        """Copy the breakers of the rows that use DRY to the device."""
        lists = [row.dry_breakers if row.uses(Sampler.DRY) else () for row in parameters]
        sets = {id(breakers): breakers for breakers in lists}
        numbers = {key: number for number, key in enumerate(sets)}
        tables = [_table(_Same(breakers), placement) for breakers in sets.values()]
        rows = placement.integers([numbers[id(breakers)] for breakers in lists])
        return cls(
            singles=torch.stack([table.is_single for table in tables]),
            set_of_row=rows,
            tails=_stack([table.tails for table in tables], _ANY_TOKEN)[rows[:, 0]],
            keys=_stack([table.keys for table in tables], _NO_KEY)[rows[:, 0]],
        )

    def is_single(self, ids: Tensor) -> Tensor:
        """Which of the tokens ([rows, any], all in the vocabulary) are breakers by themselves."""
        return self.singles.view(-1)[self.set_of_row * self.singles.shape[1] + ids]

    def limits(self, tokens: Tensor) -> Tensor:
        """Longest match ([rows, 1]) that does not extend back across the newest breaker.

        `tokens` are [rows, window], the newest in the last column.
        """
        recent = tokens[:, -_SEARCHED_TOKENS:].flip(1)
        lengths = self._tail_lengths(recent)
        ages = torch.arange(recent.shape[1], device=tokens.device)
        newest = ages.where(lengths >= 0, _NO_LIMIT).amin(-1, keepdim=True)
        limits = (ages - lengths).gather(1, newest.clamp(max=recent.shape[1] - 1))
        return limits.where(newest < _NO_LIMIT, _NO_LIMIT)

    def _tail_lengths(self, recent: Tensor) -> Tensor:
        """Tail length of the longest breaker that begins at each token, newest first; -1: none."""
        is_known = (recent >= 0) & (recent < self.singles.shape[1])
        is_single = self.is_single(recent.where(is_known, 0)) & is_known
        lengths = torch.zeros_like(recent).where(is_single, -1)
        if self.keys.shape[1] == 0:
            return lengths
        tail_lengths = (self.tails != _ANY_TOKEN).sum(-1).unsqueeze(1)
        return lengths.maximum(tail_lengths.where(self._patterns(recent), -1).amax(-1))

    def _patterns(self, recent: Tensor) -> Tensor:
        """[rows, recent, patterns]: whether the pattern's head is there, followed by its tail."""
        patterns = torch.arange(self.tails.shape[1], device=recent.device)
        wanted = (recent.unsqueeze(2) * _PATTERNS + patterns).flatten(1)
        places = torch.searchsorted(self.keys, wanted).clamp_(max=self.keys.shape[1] - 1)
        found = (self.keys.gather(1, places) == wanted).unflatten(1, (recent.shape[1], -1))
        for offset in range(self.tails.shape[2]):
            following = functional.pad(recent, (offset + 1, 0), value=_NO_TOKEN)
            following = following[:, : recent.shape[1]].unsqueeze(2)
            tail = self.tails[:, None, :, offset]
            found &= (following == tail) | (tail == _ANY_TOKEN)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """One set of breakers on the device; fields as in `BreakerRows`."""

    is_single: Tensor
    tails: Tensor
    keys: Tensor


class _Same:
    """Wraps a tuple for fast lookups: equal only to itself."""

    def __init__(self, breakers: tuple[Breaker, ...]) -> None:
        self.breakers = breakers

    @override
    def __hash__(self) -> int:
        return id(self.breakers)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.breakers is self.breakers


@lru_cache(maxsize=64)
def _table(same: _Same, placement: Placement) -> _Table:
    singles: set[int] = set()
    heads_of: dict[tuple[int, ...], set[int]] = {}
    for heads, tail in same.breakers:
        known = {head for head in heads if 0 <= head < placement.vocab_size}
        found = heads_of.setdefault(tail[:LONGEST_TAIL], set()) if tail else singles
        found.update(known)
    width = max(map(len, heads_of), default=0)
    tails = [[*tail, *[_ANY_TOKEN] * (width - len(tail))] for tail in heads_of]
    keys = sorted(
        head * _PATTERNS + number
        for number, heads in enumerate(heads_of.values())
        for head in heads
    )
    is_single = torch.zeros(placement.vocab_size, dtype=torch.bool, device=placement.device)
    is_single[_integers(sorted(singles), placement)] = True
    return _Table(
        is_single=is_single,
        tails=_integers(tails, placement).view(len(tails), width),
        keys=_integers(keys, placement),
    )


def _integers(values: Iterable[int] | Iterable[list[int]], placement: Placement) -> Tensor:
    return placement.move(torch.tensor(values, dtype=torch.int64))


def _stack(tensors: Sequence[Tensor], filling: int) -> Tensor:
    """Stack tensors of the same rank but different sizes."""
    sizes = [max(lengths) for lengths in zip(*(tensor.shape for tensor in tensors), strict=True)]
    stacked = tensors[0].new_full((len(tensors), *sizes), filling)
    for target, tensor in zip(stacked, tensors, strict=True):
        target[tuple(slice(length) for length in tensor.shape)] = tensor
    return stacked


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

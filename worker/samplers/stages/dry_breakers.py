"""Positions of DRY's breakers among the newest tokens.

A breaker is a head token and the tail tokens that must follow it, often none. Breakers with the
same tail form a pattern. Patterns without a tail are a table of the vocabulary. The others are a
sorted list of keys of head and pattern, since a text has hundreds of heads but few tails.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from contract.sampling import Sampler
from worker.samplers.candidates import Placement
from worker.samplers.parameters import LONGEST_TAIL, Breaker, SequenceChain

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

"""Random draws that depend only on a seed and a position.

The draws of a sequence are therefore independent of the other sequences in the batch, equal on
CPUs and GPUs, and unchanged after a move to another worker.
"""

import torch
from torch import Tensor

_MASK = 2**64 - 1
_SIGN = 2**63


def signed(value: int) -> int:
    """Return the integer that has the same low 64 bits and fits into an int64 tensor."""
    return ((value + _SIGN) & _MASK) - _SIGN


_STEP = signed(0x9E3779B97F4A7C15)
_FIRST = signed(0xBF58476D1CE4E5B9)
_SECOND = signed(0x94D049BB133111EB)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Return numbers in [0, 1), float64, drawn by splitmix64 from int64 tensors of one shape."""
    mixed = seed * _STEP + (position + 1) * _FIRST
    mixed = (mixed ^ _shift(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shift(mixed, 27)) * _SECOND
    mixed = mixed ^ _shift(mixed, 31)
    return _shift(mixed, 11).to(torch.float64) / 2.0**53


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift of int64 copies the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)

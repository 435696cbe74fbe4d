"""Mirostat 1 and 2: truncation that steers the surprise of the sampled tokens towards a target.

As in llama.cpp, only the temperature precedes it. The state of a sequence is `mu`, the largest
surprise in bits that is allowed; it starts at twice the target (`ChainParameters.initial_mu`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from worker.samplers.candidates import MASKED, Placement
from worker.samplers.parameters import SequenceChain
from worker.samplers.stages.temperature import LOWEST

_FITTED_TOKENS = 100
"""Number of most probable tokens from which version 1 estimates the decline."""
_SMALLEST_EXPONENT = 1e-6
_LN2 = math.log(2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MirostatRows:
    """The parameters of sequences with `ChainParameters.uses_mirostat`, one row each."""

    temperature: Tensor
    tau: Tensor
    eta: Tensor
    is_first_version: Tensor | None
    """None if no row uses version 1, which requires sorting."""
    prompt_tokens: Tensor
    replayed: Tensor | None
    """[rows, tokens]: tokens to sample again, padded with -1; None if no row has any."""

    @classmethod
    def build(cls, parameters: Sequence[SequenceChain], placement: Placement) -> Self:
        """Copy the parameters to the device."""
        first = [row.mirostat_version == 1 for row in parameters]
        return cls(
            temperature=placement.floats([max(LOWEST, row.temperature) for row in parameters]),
            tau=placement.floats([row.mirostat_tau for row in parameters]),
            eta=placement.floats([row.mirostat_eta for row in parameters]),
            is_first_version=placement.move(torch.tensor(first).unsqueeze(1))
            if any(first)
            else None,
            prompt_tokens=placement.integers([row.prompt_tokens for row in parameters]),
            replayed=_replayed([row.replayed for row in parameters], placement),
        )


def apply_mirostat(logits: Tensor, rows: MirostatRows, mu: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits to sample from at temperature 1 without truncation, and input for `next_mu`.

    Logits of minus infinity stay so. Nothing waits for the device.

    Args:
        logits: [rows, vocabulary], float32; changed in place.
        rows: Parameters of the rows.
        mu: [rows], float32: the state.

    Returns:
        `logits`, and the log-probabilities (nats) of the remaining tokens, minus infinity for the
        others.
    """
    limit = mu.unsqueeze(1).to(logits.dtype)
    logprobs = logits.div_(rows.temperature).log_softmax(-1)
    # As in llama.cpp, a token whose surprise equals mu is kept.
    removed = -logprobs / _LN2 > limit
    if rows.is_first_version is not None:
        removed = torch.where(rows.is_first_version, _beyond_top_k(logprobs, limit), removed)
    removed.scatter_(1, logprobs.argmax(-1, keepdim=True), value=False)
    logits.masked_fill_(removed, MASKED)
    return logits, logits.log_softmax(-1)


def replay(logits: Tensor, rows: MirostatRows, total_tokens: Tensor) -> Tensor:
    """Return logits that force the tokens of the rows that replay; other rows are unchanged.

    Args:
        logits: [rows, vocabulary].
        rows: Parameters of the rows.
        total_tokens: [rows], int64; tokens of prompt and completion so far.
    """
    if rows.replayed is None:
        return logits
    position = total_tokens.unsqueeze(1) - rows.prompt_tokens
    longest = rows.replayed.shape[1]
    token = rows.replayed.gather(1, position.clamp(0, longest - 1))
    token = token.where(position < longest, -1)
    alone = torch.full_like(logits, MASKED).scatter_(1, token.clamp(min=0), 0.0)
    return torch.where(token >= 0, alone, logits)


def next_mu(mu: Tensor, kept_logprobs: Tensor, *, sampled: Tensor, rows: MirostatRows) -> Tensor:
    """Return the state after `sampled` ([rows], int64) was sampled.

    It is unchanged where the token is -1 or was not among the remaining ones. If the model cannot
    reach a target, mu would grow without limit and then take long to return. It is therefore
    limited
    to twice the target or twice the surprise of a uniform distribution, whichever is larger. Above
    this limit, almost nothing is removed.
    """
    vocab_size = kept_logprobs.shape[1]
    is_token = (sampled >= 0) & (sampled < vocab_size)
    ids = sampled.where(is_token, 0).unsqueeze(1)
    surprise = -kept_logprobs.gather(1, ids).squeeze(1) / _LN2
    tau, eta = rows.tau.squeeze(1), rows.eta.squeeze(1)
    largest = 2.0 * tau.clamp(min=math.log2(vocab_size))
    moved = (mu - eta * (surprise - tau)).minimum(largest)
    return moved.where(is_token & surprise.isfinite(), mu)


def _replayed(lists: Sequence[Sequence[int]], placement: Placement) -> Tensor | None:
    longest = max(map(len, lists))
    if longest == 0:
        return None
    table = torch.full((len(lists), longest), -1, dtype=torch.int64)
    for row, token_ids in zip(table, lists, strict=True):
        row[: len(token_ids)] = torch.tensor(token_ids)
    return placement.move(table)


def _beyond_top_k(logprobs: Tensor, mu: Tensor) -> Tensor:
    """Version 1: the tokens beyond the k most probable; of equal ones, the lower ids come first."""
    ranked, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ranked.shape[1], device=ranked.device)
    is_beyond = ranks >= _estimated_k(ranked, mu)
    return torch.zeros_like(is_beyond).scatter_(1, ids, is_beyond)


def _estimated_k(ranked: Tensor, mu: Tensor) -> Tensor:
    """Number of tokens that a fitted Zipf distribution needs for a surprise of mu."""
    log_size = math.log(ranked.shape[1])
    exponent = _zipf_exponent(ranked).clamp_(min=_SMALLEST_EXPONENT)
    epsilon = exponent - 1.0
    # epsilon / (1 - size ** -epsilon), which is 1 / log(size) in the limit of epsilon = 0.
    is_zero = epsilon.abs() < _SMALLEST_EXPONENT
    ratio = torch.where(is_zero, 1.0 / log_size, epsilon / -torch.expm1(-epsilon * log_size))
    log_k = (ratio.log() + mu * _LN2) / exponent
    return log_k.clamp_(0.0, log_size + 1.0).exp_().floor_()


def _zipf_exponent(ranked: Tensor) -> Tensor:
    """Least squares fit of log-probability to log-rank, over the most probable tokens."""
    head = ranked[:, :_FITTED_TOKENS]
    ranks = torch.arange(1, head.shape[1], device=head.device, dtype=head.dtype)
    distance = torch.log1p(1.0 / ranks)
    is_pair = head[:, 1:] > MASKED
    drop = (head[:, :-1] - head[:, 1:]).where(is_pair, 0.0)
    squares = distance.square().where(is_pair, 0.0).sum(-1, keepdim=True)
    return (distance * drop).sum(-1, keepdim=True) / squares.clamp_(min=_SMALLEST_EXPONENT)

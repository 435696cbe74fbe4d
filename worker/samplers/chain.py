"""Application of a sampler chain to the logits of its rows."""

from torch import Tensor

from worker.samplers.candidates import Candidates, Context
from worker.samplers.rows import Rows


def apply_chain(logits: Tensor, rows: Rows, *, history: Tensor, total_tokens: Tensor) -> Tensor:
    """Return logits to sample from at temperature 1 without truncation, or to take the maximum of.

    They are `logits`, changed in place. Logits of minus infinity stay so, and at least one other
    token remains. Nothing waits for the device.

    Args:
        logits: [rows, vocabulary], in the dtype of the rows' `Placement`.
        rows: Parameters of the rows.
        history: [rows, window], int64; the newest token in the last column, -1 in empty places.
            The window is as wide as the largest `history_needed`, or holds all existing tokens.
        total_tokens: [rows], int64; tokens of prompt and completion so far.
    """
    candidates = Candidates(logits, ranked_tokens=rows.ranked_tokens)
    context = Context(history=history, total_tokens=total_tokens)
    for step in rows.steps:
        step.apply(candidates, context)
    return candidates.by_token()

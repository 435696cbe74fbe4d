"""Log-probabilities of a chain's result, for the sequences that request them.

vLLM reports log-probabilities of the model's own distribution, or of the final one for all requests
of an engine. Here the rows of some sequences are replaced before vLLM selects the likeliest tokens
(`worker.engine.vllm.plugin`).
"""

import torch
from torch import Tensor


class ReportedRows:
    """The final logits of a step's rows, from the chain to the selection of the reported tokens."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._logits: list[Tensor] = []

    def add(self, rows: Tensor, logits: Tensor) -> None:
        """Report final logits ([n, vocabulary]) in place of those of the batch's `rows` ([n])."""
        self._rows.append(rows)
        self._logits.append(logits)

    def put_into(self, scores: Tensor) -> Tensor:
        """Return scores ([rows, vocabulary]) in which the reported rows are replaced, once.

        Scores are logits or log-probabilities; those of the reported rows are log-probabilities.
        """
        if not self._rows:
            return scores
        rows, logits = torch.cat(self._rows), torch.cat(self._logits)
        self._rows, self._logits = [], []
        return scores.float().index_copy(0, rows, logits.log_softmax(-1, dtype=torch.float32))


REPORTED = ReportedRows()
"""The rows of the current step: a vLLM process samples in one thread."""

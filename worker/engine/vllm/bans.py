"""The tokens that a request forbids, and the sequences to which they leave no token.

If every token is forbidden, vLLM's samplers return one of them. So a forbidden token in the output
shows that nothing was left, whichever model runner and sampler produced it.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from worker.engine.base import EngineRequest, SequenceEnd, SequenceOutput


class Bans:
    """What a job forbids beside its grammar."""

    def __init__(self, request: EngineRequest, params: Any, *, forced: Iterable[int]) -> None:
        """Read the parameters that vLLM has completed; `forced` are tokens that no ban stops."""
        self._allowed = frozenset(params.allowed_token_ids or ())
        words: list[list[int]] = params.bad_words_token_ids or []
        biases = params.logit_bias or {}
        self._forbidden = {token for token, bias in biases.items() if bias == -math.inf}
        self._forbidden.update(word[0] for word in words if len(word) == 1)
        self._beginnings: dict[int, list[list[int]]] = {}
        """What forbids a token if it comes before it: the rest of bad words."""
        for *beginning, last in words:
            if beginning:
                self._beginnings.setdefault(last, []).append(beginning)
        self._min_tokens = params.min_tokens
        self._ends = params.all_stop_token_ids
        self._forced = frozenset(forced)
        self.is_empty = not (self._allowed or self._forbidden or self._beginnings)
        self._output = request.output_token_ids

    def leave_any(self, vocabulary_size: int) -> bool:
        """Whether a token is allowed at the first step."""
        candidates = self._allowed or range(vocabulary_size)
        return any(not self.forbid(each, self._output) for each in candidates)

    def forbid(self, token_id: int, output: Sequence[int]) -> bool:
        """Whether a token is forbidden after this output of its sequence."""
        if token_id in self._forced:
            return False
        return (
            token_id in self._forbidden
            or (bool(self._allowed) and token_id not in self._allowed)
            or (len(output) < self._min_tokens and token_id in self._ends)
            or any(output[-len(e) :] == e for e in self._beginnings.get(token_id, ()))
        )


class BannedOutputs:
    """The sequences of jobs that forbid tokens, each with its output."""

    def __init__(self) -> None:
        self._followed: dict[str, tuple[Bans, list[int]]] = {}

    def add(self, request: EngineRequest, bans: Bans) -> None:
        """Track a sequence until it ends."""
        if not bans.is_empty:
            self._followed[request.id] = bans, [*request.output_token_ids]

    def remove(self, sequence_ids: Iterable[str]) -> None:
        """Stop tracking sequences; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            self._followed.pop(sequence_id, None)

    def ended(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """Return a step's outputs, and end the sequences that have sampled a forbidden token."""
        return [self._ended(each) for each in outputs] if self._followed else outputs

    def _ended(self, output: SequenceOutput) -> SequenceOutput:
        followed = self._followed.get(output.sequence_id)
        if followed is None or output.end is SequenceEnd.ERROR:
            return output
        bans, before = followed
        for token_id in output.token_ids:
            if bans.forbid(token_id, before):
                del self._followed[output.sequence_id]
                return replace(output, token_ids=[], logprobs=None, end=SequenceEnd.STUCK)
            before.append(token_id)
        if output.end is not None:
            del self._followed[output.sequence_id]
        return output

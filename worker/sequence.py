"""One sequence of a job: token ids from the engine become text, log-probabilities and an end."""

from dataclasses import dataclass, field

from contract.messages import TokenLogprob
from contract.outcomes import FinishReason
from worker.engine.base import SequenceEnd, SequenceOutput, TokenScores
from worker.logprobs import LOWEST_LOGPROB, TokenTexts, token_logprob
from worker.text import Detokenizer, StopMatcher


@dataclass(slots=True)
class Piece:
    """New output of a sequence that has not been sent yet."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Sequence:
    """Follows one sequence of the engine until it ends, by the engine or by a stop string."""

    __slots__ = (
        "_alternatives",
        "_detokenizer",
        "_offset",
        "_returned",
        "_stops",
        "_texts",
        "cumulative_logprob",
        "finish_reason",
        "has_been_told",
        "id",
        "index",
        "piece",
        "stop_reason",
        "tokens",
    )

    def __init__(
        self,
        sequence_id: str,
        index: int,
        detokenizer: Detokenizer,
        *,
        stop: list[str],
        texts: TokenTexts,
        alternatives: int | None,
    ) -> None:
        self.id = sequence_id
        self.index = index
        self.piece = Piece()
        self.tokens = 0
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.has_been_told = False
        """Whether any of it has been sent."""
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stop) if stop else None
        self._texts = texts
        self._alternatives = alternatives
        self._offset = 0
        self._returned = 0

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token, by which `best_of` ranks."""
        return self.cumulative_logprob / max(self.tokens, 1)

    def take_piece(self) -> Piece:
        """Hand over what has come since the last call."""
        piece, self.piece = self.piece, Piece()
        self.has_been_told = True
        return piece

    def receive(self, output: SequenceOutput) -> None:
        """Take in what one engine step added."""
        token_ids = output.token_ids
        is_stopped_by_token = output.end is SequenceEnd.STOP
        for position, token_id in enumerate(token_ids):
            is_stop_token = is_stopped_by_token and position == len(token_ids) - 1
            text = "" if is_stop_token else self._detokenizer.step(token_id)
            self._add_token(token_id, text, output, position)
            if self._stops is not None and self._stops.matched is not None:
                self._end(FinishReason.STOP, self._stops.matched)
                return
        if output.end is not None:
            self._flush()
            reason = FinishReason.STOP if is_stopped_by_token else FinishReason.LENGTH
            self._end(reason, output.stop_token_id)

    def _add_token(self, token_id: int, text: str, output: SequenceOutput, position: int) -> None:
        piece = self.piece
        self.tokens += 1
        piece.token_ids.append(token_id)
        if output.logprobs is not None:
            self._add_logprob(text, output.logprobs[position])
        if text:
            self._offset += len(text)
            if self._stops is not None:
                text = self._stops.push(text)
            self._returned += len(text)
            piece.text += text

    def _add_logprob(self, text: str, scores: TokenScores) -> None:
        self.cumulative_logprob += max(scores[0][1], LOWEST_LOGPROB)
        if self._alternatives is not None:
            entry = token_logprob(
                self._texts,
                scores,
                text=text,
                offset=self._offset,
                alternatives=self._alternatives,
            )
            self.piece.logprobs.append(entry)

    def _flush(self) -> None:
        if self._stops is not None:
            text = self._stops.flush()
            self._returned += len(text)
            self.piece.text += text

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        # Tokens of a stop string that was cut off have no place in the text: they stand at its end.
        self.piece.logprobs = [
            TokenLogprob(entry.token, entry.logprob, min(entry.offset, self._returned), entry.top)
            for entry in self.piece.logprobs
        ]

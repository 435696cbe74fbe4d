"""One sequence of a job: turns the engine's token ids into text, log-probabilities and an end."""

import time
from dataclasses import InitVar, dataclass, field

import msgspec

from contract.messages import GenerationJob, SequenceProgress, TokenLogprob
from contract.outcomes import FinishReason
from contract.queue import headroom_tokens
from worker.engine.base import SequenceEnd, SequenceOutput, TokenScores
from worker.execution.logprobs import LOWEST_LOGPROB, TokenTexts, token_logprob
from worker.execution.text import Detokenizer, StopMatcher, StopStrings
from worker.parsing.base import Parser
from worker.parsing.reader import ParsedOutput, Reader

REPETITION = "repetition"
"""The stop reason of a sequence that ended because it repeated itself."""

SAFE_TOKENS = (64, 8, 1)
"""Tokens that a sequence has generated since a preemption when it may be preempted again.

The later numbers count only if no other sequences make room. Then it must have generated for as
long as it took to process its earlier tokens again.
"""

LAST_TOKENS = 8
"""A sequence with no more tokens than this left is not preempted."""

_REASONS = {
    SequenceEnd.STOP: FinishReason.STOP,
    SequenceEnd.REPETITION: FinishReason.STOP,
    SequenceEnd.LENGTH: FinishReason.LENGTH,
}


@dataclass(slots=True)
class Piece:
    """Output of a sequence that was not sent yet."""

    start: int = 0
    """Number of tokens of the sequence before this piece."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    parsed_output: ParsedOutput | None = None
    """Replaces the text if the response is parsed."""


@dataclass(eq=False, slots=True)
class Sequence:
    """Tracks one engine sequence until the engine, a stop string or a time limit ends it.

    All state is a function of the tokens. A resumed sequence therefore has the state of the earlier
    attempt, including held-back text and incomplete characters.
    """

    id: str
    index: int
    _detokenizer: Detokenizer
    _job: GenerationJob
    stops: InitVar[StopStrings | None]
    _texts: TokenTexts
    parser: InitVar[Parser | None]
    _resumed: SequenceProgress | None
    is_again: InitVar[bool] = False
    piece: Piece = field(default_factory=Piece)
    tokens: int = 0
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    pooled: bytes = b""
    """The result for an input of a pooling model."""
    was_sent: bool = False
    """Whether any part of the sequence was sent."""
    parked_at: float = 0.0
    """`time.monotonic` since when it waits for room in the engine, or 0."""
    is_plain: bool = field(init=False)
    """Whether text depends on nothing but the tokens, so that `add` may decode it later."""
    _stops: StopMatcher | None = None
    _reader: Reader | None = None
    _offset: int = 0
    _returned: int = 0
    _time_is_up_at: float | None = None
    _has_new_line: bool = False
    _decoded: int = 0
    """Number of tokens of a plain sequence's piece whose text is in it."""
    _sent: list[int] | None = None
    """The tokens before the piece, if the sequence may leave the engine and return."""
    continued_at: float = 0.0
    """`time.monotonic` when it had its first token after `_returned_at`, or 0."""
    _returned_at: float = 0.0
    """`time.monotonic` when it returned after a preemption, or 0."""
    _returned_with: int = 0
    """Its tokens then."""
    reserved_tokens: int = 0
    """KV-cache tokens that are kept for it, at least: those of earlier attempts and some more."""

    def __post_init__(
        self, stops: StopStrings | None, parser: Parser | None, is_again: bool
    ) -> None:
        job, resumed = self._job, self.resumed_token_ids
        if stops is not None:
            self._stops = StopMatcher(stops, includes_stop=job.includes_stop)
        if parser is not None:
            hides = job.parsing is not None and job.parsing.hides_special_tokens
            self._reader = Reader(parser, self._texts.markup if hides else {})
        self.is_plain = (
            stops is None
            and parser is None
            and job.logprobs is None
            and not job.is_ranked
            and not job.max_predict_ms
            and job.max_tokens > 0
        )
        if job.sequences > 1:
            self._sent = [*resumed]
        # Also if it lost its room before its first token: it would process its prompt for ever.
        self._returned_at = time.monotonic() if is_again else 0.0
        self._returned_with = len(resumed)
        self.reserved_tokens = len(resumed) + self.headroom
        if self._resumed is not None:
            self._resume(self._resumed)

    @property
    def resumed_token_ids(self) -> list[int]:
        """Tokens of earlier attempts, which were already sent."""
        return [] if self._resumed is None else self._resumed.token_ids

    @property
    def known_token_ids(self) -> list[int]:
        """Tokens that the engine must not generate again."""
        return self.resumed_token_ids if self._sent is None else self._sent + self.piece.token_ids

    @property
    def headroom(self) -> int:
        """KV-cache tokens that are kept for new tokens of this attempt."""
        return headroom_tokens(self._job)

    @property
    def held_tokens(self) -> int:
        """KV-cache tokens that the sequence uses, or that are reserved for it."""
        return max(self.tokens, self.reserved_tokens)

    @property
    def is_parked(self) -> bool:
        """Whether it waits for room in the engine."""
        return self.parked_at > 0

    def may_be_preempted(self, safe_tokens: int) -> bool:
        """Whether it was not preempted just now, and will not end soon."""
        ends_soon = self.tokens >= self._job.max_tokens - LAST_TOKENS
        return not ends_soon and not self.is_safe(safe_tokens)

    def is_safe(self, safe_tokens: int) -> bool:
        """Whether it was preempted just now (see SAFE_TOKENS)."""
        new, since = self.tokens - self._returned_with, self.continued_at
        if not self._returned_at or new >= SAFE_TOKENS[0]:
            return False
        has_made_up = since and time.monotonic() - since >= since - self._returned_at
        return new < safe_tokens or not has_made_up

    def begin_again(self, sequence_id: str) -> None:
        """Return to the engine with another id."""
        self.id, self.parked_at, self.continued_at = sequence_id, 0.0, 0.0
        self._returned_at, self._returned_with = time.monotonic(), self.tokens

    @property
    def new_tokens(self) -> int:
        """Tokens of this attempt."""
        return self.tokens - len(self.resumed_token_ids)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per token."""
        return self.cumulative_logprob / max(self.tokens, 1)

    @property
    def is_slow(self) -> bool:
        """Whether parsing is slow, so that `receive` must run in another thread."""
        return self._reader is not None and self._reader.is_slow

    def take_piece(self) -> Piece:
        """Return and reset the output since the last call."""
        piece, self.piece = self.piece, Piece(self.tokens)
        if self._sent is not None:
            self._sent += piece.token_ids
        self._decoded = 0
        self.was_sent = True
        return piece

    def add(self, token_ids: list[int]) -> None:
        """Add tokens of a plain sequence that does not end with them."""
        self.tokens += len(token_ids)
        self.piece.token_ids += token_ids

    def decode(self) -> str:
        """Return the text of a plain sequence's piece, to be called before the piece is taken."""
        piece = self.piece
        if tokens := piece.token_ids[self._decoded :]:
            piece.text += self._detokenizer.decode(tokens)
            self._decoded += len(tokens)
        return piece.text

    def receive(self, output: SequenceOutput) -> None:
        """Add the output of one engine step."""
        if self.is_plain:
            self.decode()
            self._decoded += len(output.token_ids)
        last = len(output.token_ids) - 1
        for position, token_id in enumerate(output.token_ids):
            scores = None if output.logprobs is None else output.logprobs[position]
            if position == last and output.end is SequenceEnd.STOP:
                self._add_stop_token(token_id, scores, output.stop_token_id)
            else:
                self._add_token(token_id, self._detokenizer.step(token_id), scores)
            if self._stops is not None and self._stops.matched is not None:
                self._end(FinishReason.STOP, self._stops.matched)
                return
        if output.end is not None:
            self._flush()
            is_repetition = output.end is SequenceEnd.REPETITION
            reason = REPETITION if is_repetition else self._named(output.stop_token_id)
            self._end(_REASONS[output.end], reason)
        elif self._job.max_predict_ms and self._is_time_up():
            self._flush()
            self._end(FinishReason.LENGTH, None)
        elif self._reader is not None:
            self._reader.read(self._parsed_output())

    def _resume(self, progress: SequenceProgress) -> None:
        self.cumulative_logprob = progress.cumulative_logprob
        self.finish_reason = progress.finish_reason
        self.stop_reason = progress.stop_reason
        if self.finish_reason is None:
            self._replay(progress.token_ids)
        self.tokens = len(progress.token_ids)
        self.piece.start = self.tokens

    def _replay(self, token_ids: list[int]) -> None:
        """Replay tokens whose text was already sent. They may complete the sequence."""
        stops = self._stops
        for token_id in token_ids:
            self._add_token(token_id, self._detokenizer.step(token_id), None)
            if stops is not None and stops.matched is not None:
                break
        self.piece = Piece()
        if self._reader is not None:
            self._reader.mark_sent()
        if stops is not None and stops.matched is not None:
            self._end(FinishReason.STOP, stops.matched)
        elif token_ids and len(token_ids) == self._job.max_tokens:
            self._flush()
            self._end(FinishReason.LENGTH, None)

    def _named(self, stop_token_id: int | None) -> int | None:
        """Return a stop token that the job names; None for the model's own end-of-text tokens."""
        return stop_token_id if stop_token_id in self._job.sampling.stop_token_ids else None

    def _add_stop_token(
        self, token_id: int, scores: TokenScores | None, stop_token_id: int | None
    ) -> None:
        # Like a stop string, a stop token is shown if the
        # job asks for it; an end-of-text token never is.
        shows = self._job.includes_stop and self._named(stop_token_id) is not None
        text = self._detokenizer.step(token_id) if shows else ""
        self._add_token(token_id, text, scores, name=self._texts[token_id])

    def _add_token(
        self, token_id: int, text: str, scores: TokenScores | None, *, name: str = ""
    ) -> None:
        piece = self.piece
        self.tokens += 1
        piece.token_ids.append(token_id)
        if scores is not None:
            self._add_logprob(text or name, scores)
        if text:
            length = len(text)
            self._offset += length
            self._has_new_line = self._has_new_line or "\n" in text
            if self._stops is not None:
                may_match = self.tokens > self._job.sampling.min_tokens
                text = self._stops.push(text, may_match=may_match)
            self._returned += len(text)
            if self._reader is None:
                piece.text += text
            else:
                self._reader.push(token_id, length, text)
        elif self._reader is not None:
            self._reader.push(token_id, 0, "")

    def _add_logprob(self, text: str, scores: TokenScores) -> None:
        self.cumulative_logprob += max(scores[0][1], LOWEST_LOGPROB)
        if self._job.logprobs is not None:
            entry = token_logprob(
                self._texts,
                scores,
                text=text,
                offset=self._offset,
                alternatives=self._job.logprobs,
            )
            self.piece.logprobs.append(entry)

    def _is_time_up(self) -> bool:
        """Whether the time limit has passed and a line has ended, as in llama.cpp."""
        now = time.monotonic()
        if self._time_is_up_at is None:
            resumption = self._job.resumption
            spent_ms = 0.0 if resumption is None else resumption.generation_ms
            self._time_is_up_at = now + (self._job.max_predict_ms - spent_ms) / 1000
        return self._has_new_line and now >= self._time_is_up_at

    def _flush(self) -> None:
        if self._stops is not None:
            text = self._stops.flush()
            self._returned += len(text)
            if self._reader is None:
                self.piece.text += text
            else:
                self._reader.show(text)

    def _parsed_output(self) -> ParsedOutput:
        if self.piece.parsed_output is None:
            self.piece.parsed_output = ParsedOutput()
        return self.piece.parsed_output

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        if self._reader is not None:
            self._reader.finish(reason, self._parsed_output())
        self.finish_reason = reason
        self.stop_reason = stop_reason
        # Tokens of a removed stop string have no position in the text: place them at its end.
        self.piece.logprobs = [
            msgspec.structs.replace(entry, offset=min(entry.offset, self._returned))
            for entry in self.piece.logprobs
        ]

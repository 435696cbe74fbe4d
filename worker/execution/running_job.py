"""One claimed job (a generation): its sequences, their choices, and the replies to the gateway.

A sequence produces one choice, with two exceptions. If all choices would be equal
(`GenerationJob.is_replicated`), one sequence produces all of them. If sequences are ranked, each is
sent under its own index, and the final message lists the chosen ones.

A job that an earlier attempt began continues after the tokens in its resumption. Counts are totals
of all attempts.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import IntEnum
from itertools import accumulate, count
from typing import Any

import msgspec
from tokenizers import Tokenizer

from common import clock
from contract.messages import (
    LOGPROBS_AT_ONCE,
    Delta,
    GenerationJob,
    JobFinished,
    JobReturned,
    JobStarted,
    Parsing,
    Pooling,
    PromptScored,
    Ranking,
    Resumption,
    ReturnReason,
    SequenceProgress,
    encode_logprobs,
)
from contract.outcomes import FinishReason
from contract.queue import JobClaim, LeaseReport
from worker import telemetry
from worker.engine.base import EngineAdapter, EngineRequest, SequenceOutput
from worker.execution.logprobs import TokenTexts, prompt_logprobs
from worker.execution.sequence import Sequence
from worker.execution.text import Detokenizer, StopStrings
from worker.parsing.base import NO_PARSERS, MakeParser, Parsers
from worker.queue.replies import ReplyOutbox

_LEAST_TOKENS = 64
"""Shorter prompts measure other work."""
_MEMORY_TOKENS = 20_000
"""After so many tokens, earlier prompts count half: short ones do not hide what long ones show."""
_GUESSED_MICROSECONDS = 50.0
"""Until a prompt is measured: a new worker would else take jobs that others have cached."""


class PrefillPace:
    """The time in which the engine processes a prompt token, over the last prompts."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Note the uncached tokens of a prompt, and the time from the claim to the first token."""
        if tokens >= _LEAST_TOKENS:
            kept = _MEMORY_TOKENS / (_MEMORY_TOKENS + tokens)
            self._tokens = self._tokens * kept + tokens
            self._seconds = self._seconds * kept + seconds

    @property
    def microseconds(self) -> float:
        """The time per token."""
        return self._seconds / self._tokens * 1e6 if self._tokens else _GUESSED_MICROSECONDS


GATHERED_TOKENS = 64
"""Tokens in one delta of a job that is ranked or not streamed."""

_LARGEST_SEED = 2**63 - 1

_sequence_ids = count(1)


class Stage(IntEnum):
    """How far this worker has come with a job."""

    CLAIMED = 0  # The engine does not have all of its sequences yet.
    SUBMITTED = 1
    ENDED = 2  # The job finished or failed, was returned to its gateway, or was dropped.


def _prepare(parsers: Parsers, job: GenerationJob, parsing: Parsing) -> MakeParser | None:
    opening = job.prompt_token_ids[-parsing.opening_tokens :] if parsing.opening_tokens else ()
    return parsers.prepare(parsing, [*opening])


@dataclass(eq=False)
class RunningJob:
    """Tracks one job until its last sequence ends."""

    claim: InitVar[JobClaim]
    outbox: ReplyOutbox
    _: KW_ONLY
    tokenizer: Tokenizer
    texts: TokenTexts
    engine: str = ""
    """The engine's name."""
    exactness_class: str = ""
    """The engine's class."""
    parsers: InitVar[Parsers] = NO_PARSERS
    asked_at: float = field(default_factory=time.monotonic)
    """`time.monotonic` when the job was claimed, before the queue replied."""
    on_prefilled: Callable[[], None] | None = None
    prefill_pace: PrefillPace | None = None

    def __post_init__(self, claim: JobClaim, parsers: Parsers) -> None:
        self.job = job = claim.job
        self.attempt = claim.attempt
        self.waited_seconds = claim.waited_seconds
        self.is_preemptible = claim.is_preemptible
        self.weight = claim.weight
        self.adapter: EngineAdapter | None = None
        """The job's adapter, once it is loaded."""
        self._stage = Stage.CLAIMED
        self.first_token_at: float | None = None
        """`time.monotonic` when the engine had processed the prompt in this attempt."""
        self.is_slow_to_parse = False
        """Whether parsing the job's output is slow, so that it must run in another thread."""
        self.backlog: deque[SequenceOutput] = deque()
        """Engine outputs that were not parsed yet."""
        self.is_parsing = False
        """Whether another thread may be using the sequences."""
        resumption = job.resumption or Resumption([])
        self._is_prompt_counted = resumption.prompt_tokens > 0
        self.prompt_tokens = resumption.prompt_tokens or len(job.prompt_token_ids)
        """Prompt tokens as the engine first counted them: an image takes more than its
        placeholders."""
        self._cached_tokens = resumption.cached_tokens
        self._stops = StopStrings(job.stop) if job.stop else None
        self._make_parser = None if job.parsing is None else _prepare(parsers, job, job.parsing)
        hides_all = (
            job.parsing is not None
            and job.parsing.hides_special_tokens
            and self._make_parser is None
        )
        self._shows_special_tokens = job.shows_special_tokens and not hides_all
        self._hidden = frozenset(self.texts.markup if hides_all else ())
        self.claimed_at = time.monotonic()
        self._is_replicated = job.is_replicated
        self._is_ranked = job.is_ranked
        self._is_gathered = self._is_ranked or not job.stream
        progress: list[SequenceProgress | None] = [*resumption.sequences]
        self.sequences = [
            self._make_sequence(index, each)
            for index, each in enumerate(progress or [None] * job.sequences)
        ]
        self.open_sequences = {
            sequence.id: sequence for sequence in self.sequences if sequence.finish_reason is None
        }
        self.parked: list[Sequence] = []
        """Open sequences that wait for room in the engine, in order."""
        self._to_submit = [*self.open_sequences.values()]
        has_media = job.images or job.audio
        self.is_divisible = job.sequences > 1 and job.pooling is None and not has_media
        """Whether some of the sequences may be parked."""
        self.is_slow_to_parse = any(each.is_slow for each in self.open_sequences.values())
        self._first_open = next(iter(self.open_sequences), None)

    def begin(self) -> None:
        """Send the end of everything that the tokens of earlier attempts complete."""
        job, resumption = self.job, self.job.resumption
        if resumption is None:
            return
        if not job.max_tokens and resumption.is_prompt_scored:
            for sequence in self.open_sequences.values():
                sequence.finish_reason = FinishReason.LENGTH
            self.open_sequences.clear()
        for sequence, known in zip(self.sequences, resumption.sequences, strict=True):
            if sequence.finish_reason is not known.finish_reason:
                self._send(sequence)
        if self.is_done:
            self._finish()

    def requests(self) -> list[EngineRequest]:
        """Return the engine requests of sequences to submit: one prompt, several seeds."""
        job = self.job
        sequences, self._to_submit = self._to_submit, []
        if job.pooling is not None:
            return self._pooling_requests(job.pooling, sequences)
        scores_prompt = job.score_prompt and not (
            job.resumption is not None and job.resumption.is_prompt_scored
        )
        logprobs = 0 if self._is_ranked and job.logprobs is None else job.logprobs
        prompt_token_ids = job.prompt_token_ids.tolist()
        return [
            EngineRequest(
                id=sequence.id,
                prompt_token_ids=prompt_token_ids,
                # An engine samples at least one token; it is dropped if the job requests none.
                max_tokens=max(job.max_tokens, 1),
                sampling=job.sampling,
                seed=(job.sampling.seed + sequence.index) & _LARGEST_SEED,
                cache_salt=job.cache_salt,
                logprobs=logprobs if job.max_tokens else None,
                prompt_logprobs=self._prompt_alternatives
                if scores_prompt and sequence.id == self._first_open
                else None,
                grammar=job.grammar if job.max_tokens else "",
                output_token_ids=sequence.known_token_ids,
                images=job.images,
                image_params=job.image_params
                or [f"images[{index}]" for index, _ in enumerate(job.images)],
                audio=job.audio,
                may_shorten=job.may_shorten,
                reads_prefix_cache=job.reads_prefix_cache,
                is_preemptible=self.is_preemptible,
                tenant=job.tenant,
                weight=self.weight,
                adapter=self.adapter,
            )
            for sequence in sequences
        ]

    def _pooling_requests(self, pooling: Pooling, sequences: list[Sequence]) -> list[EngineRequest]:
        job, ends, seconds = self.job, [*accumulate(pooling.lengths)], pooling.second_texts
        return [
            EngineRequest(
                id=sequence.id,
                prompt_token_ids=job.prompt_token_ids[
                    ends[index] - pooling.lengths[index] : ends[index]
                ].tolist(),
                max_tokens=0,
                sampling=job.sampling,
                seed=0,
                cache_salt=job.cache_salt,
                is_preemptible=self.is_preemptible,
                tenant=job.tenant,
                weight=self.weight,
                adapter=self.adapter,
                pooling=pooling,
                second_text=seconds[index] if seconds else None,
            )
            for sequence in sequences
            for index in (sequence.index,)
        ]

    def release_media(self) -> None:
        """Drop images and audio, which are not needed once the engine has read them."""
        if self.job.images or self.job.audio:
            self.job = msgspec.structs.replace(self.job, images=[], audio=b"")

    def advance(self, stage: Stage) -> None:
        """Enter a stage, unless the job is already past it."""
        self._stage = max(self._stage, stage)

    @property
    def seats(self) -> int:
        """Number of open sequences that are in the engine, or will soon be."""
        return len(self.open_sequences) - len(self.parked)

    @property
    def seated(self) -> list[Sequence]:
        """These sequences, in order."""
        open_sequences = self.open_sequences.values()
        return [e for e in open_sequences if not e.is_parked] if self.parked else [*open_sequences]

    @property
    def is_parkable(self) -> bool:
        """Whether sequences can leave the engine, or return to it, without the others."""
        is_busy = self._to_submit or self.is_parsing or self.backlog
        return self.is_divisible and self._stage is Stage.SUBMITTED and not is_busy

    def park(self, leaving: Iterable[Sequence]) -> None:
        """Park sequences that are seated."""
        for sequence in leaving:
            if sequence.is_plain:
                sequence.decode()
            if sequence.piece.token_ids and not self._is_gathered:
                self._send(sequence)
            sequence.parked_at = time.monotonic()
        self.parked = [each for each in self.open_sequences.values() if each.is_parked]
        self._to_submit = [each for each in self._to_submit if not each.is_parked]

    def unpark(self) -> None:
        """Let the first parked sequence be submitted, from its last token on."""
        sequence, new_id = self.parked.pop(0), str(next(_sequence_ids))
        telemetry.SEAT_WAIT.observe(time.monotonic() - sequence.parked_at)
        if sequence.id == self._first_open and not sequence.continued_at:
            self._first_open = new_id  # Its prompt was not processed.
        # The engine may still be ending the sequence of the former id.
        sequence.begin_again(new_id)
        self.open_sequences = {each.id: each for each in self.sequences if not each.finish_reason}
        self._to_submit.append(sequence)

    @property
    def _prompt_alternatives(self) -> int:
        job = self.job
        return (job.logprobs or 0) if job.prompt_logprobs is None else job.prompt_logprobs

    @property
    def has_ended(self) -> bool:
        """Whether the job has left this worker."""
        return self._stage is Stage.ENDED

    @property
    def is_done(self) -> bool:
        """Whether every sequence has ended."""
        return not self.open_sequences

    @property
    def has_progressed(self) -> bool:
        """Whether this attempt has produced a token, or the result of an input."""
        return any(sequence.new_tokens or sequence.pooled for sequence in self.sequences)

    @property
    def is_slow_to_submit(self) -> bool:
        """Whether submitting the job takes so long that it would delay other jobs."""
        spec = self.job.sampling
        has_breakers = spec.chain is not None and spec.chain.dry is not None
        has_media = self.job.images or self.job.audio
        return bool(has_media or self.job.grammar or spec.bad_words or has_breakers)

    @property
    def completion_tokens(self) -> int:
        """Completion tokens so far, of all sequences; a replicated one counts once per choice."""
        if not self.job.max_tokens:
            return 0
        tokens = sum(sequence.tokens for sequence in self.sequences)
        return tokens * self.job.n if self._is_replicated else tokens

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of the sequences that have ended."""
        return [
            each.finish_reason.value for each in self.sequences if each.finish_reason is not None
        ]

    @property
    def age_seconds(self) -> float:
        """Time since the job was claimed."""
        return time.monotonic() - self.claimed_at

    @property
    def reserved_tokens(self) -> int:
        """KV-cache tokens that are reserved for the job and not used yet."""
        seated = self.seated
        reserved = sum([max(each.reserved_tokens - each.tokens, 0) for each in seated])
        if self.first_token_at is None:
            reserved += self.prompt_tokens + sum(len(each.resumed_token_ids) for each in seated)
        return reserved

    @property
    def held_tokens(self) -> int:
        """KV-cache tokens that are used by the job or reserved for it."""
        return self.prompt_tokens + sum([each.held_tokens for each in self.seated])

    @property
    def report(self) -> LeaseReport:
        """The report to the queue for each lease extension and at the end."""
        return LeaseReport(
            self.job.id,
            self.attempt,
            self.completion_tokens,
            self.prompt_tokens if self._is_prompt_processed else 0,
            self._cached_tokens,
        )

    @property
    def _is_prompt_processed(self) -> bool:
        return self._is_prompt_counted or self.first_token_at is not None

    def count_prompt(self) -> None:
        """Count a submitted prompt, even if the engine has not processed all of it."""
        if self._stage is Stage.SUBMITTED and not self._is_prompt_processed:
            self._is_prompt_counted = True
            telemetry.PROMPT_TOKENS.inc(self.prompt_tokens)

    def receive(self, output: SequenceOutput, *, is_due: bool = True) -> bool:
        """Add one step's output to a sequence. Return True if the sequence ended.

        Unless `is_due`, new text is kept for a later delta.
        """
        sequence = self.open_sequences[output.sequence_id]
        if self.first_token_at is None or output.cached_tokens is not None:
            self._note_prefill(sequence, output)
        if sequence.is_plain and output.end is None:
            sequence.add(output.token_ids)
            if self._is_delta_due(sequence, is_due=is_due) and sequence.decode():
                self._send(sequence)
            return False
        if not self.job.max_tokens:
            sequence.finish_reason = FinishReason.LENGTH
            sequence.pooled = output.pooled
        else:
            sequence.receive(output)
            if self._make_parser is not None:
                self.is_slow_to_parse = self.is_slow_to_parse or sequence.is_slow
        return self._update(sequence, is_due=is_due)

    def defer(self, output: SequenceOutput) -> None:
        """Keep one step's output of a sequence, to be parsed in another thread."""
        if self.first_token_at is None or output.cached_tokens is not None:
            self._note_prefill(self.open_sequences[output.sequence_id], output)
        self.backlog.append(output)

    def parse(self, outputs: Iterable[SequenceOutput]) -> None:
        """Parse outputs of the backlog. Runs in another thread and sends nothing."""
        for output in outputs:
            sequence = self.open_sequences.get(output.sequence_id)
            # Drop everything after a stop string.
            if sequence is not None and sequence.finish_reason is None:
                sequence.receive(output)

    def send_parsed(self, sequence_id: str) -> bool:
        """Send the output of a sequence that `parse` has parsed. Return True if it ended."""
        sequence = self.open_sequences.get(sequence_id)
        return sequence is not None and self._update(sequence, is_due=True)

    def send_pending(self) -> None:
        """Send all pending output, so that another worker can resume after it."""
        if self.is_parsing:
            # The next attempt generates the unsent output again.
            return
        for sequence in self.open_sequences.values():
            if sequence.is_plain:
                sequence.decode()
            if sequence.piece.token_ids:
                self._send(sequence)

    def return_job(self, reason: ReturnReason) -> None:
        """Send pending output, and return the job with its lease for another worker."""
        self.send_pending()
        returned = JobReturned(self.job.handle, self.attempt, reason, self.has_progressed)
        self.outbox.return_job(returned, self.report)

    def _update(self, sequence: Sequence, *, is_due: bool) -> bool:
        has_ended = sequence.finish_reason is not None
        if has_ended:
            del self.open_sequences[sequence.id]
        piece = sequence.piece
        has_output = piece.text or piece.parsed_output
        if has_ended or (has_output and self._is_delta_due(sequence, is_due=is_due)):
            self._send(sequence)
        if has_ended and self.is_done:
            self._finish()
        return has_ended

    def _make_sequence(self, index: int, progress: SequenceProgress | None) -> Sequence:
        job = self.job
        return Sequence(
            str(next(_sequence_ids)),
            index,
            Detokenizer(
                self.tokenizer,
                job.prompt_token_ids if job.pooling is None else [],
                shows_special_tokens=self._shows_special_tokens,
                hidden=self._hidden,
            ),
            job,
            self._stops,
            self.texts,
            None if self._make_parser is None else self._make_parser(),
            progress,
            is_again=self.attempt > 1,
        )

    def _note_prefill(self, sequence: Sequence, output: SequenceOutput) -> None:
        is_first = sequence.id == self._first_open
        sequence.continued_at = sequence.continued_at or time.monotonic()
        if output.prompt_tokens is not None and not self._is_prompt_counted:
            self.prompt_tokens = output.prompt_tokens
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
            telemetry.PROMPT_TOKENS.inc(self.prompt_tokens)
            if self.on_prefilled is not None:
                self.on_prefilled()
            if self._is_prompt_counted:
                self._report_start()
        # Later sequences find the prompt in the cache only because the first one stored it there.
        if is_first and output.cached_tokens is not None and not self._is_prompt_counted:
            self._cached_tokens = min(output.cached_tokens, self.prompt_tokens)
            self._is_prompt_counted = True
            if self.prefill_pace is not None:
                uncached = self.prompt_tokens - self._cached_tokens
                self.prefill_pace.note(uncached, self.first_token_at - self.claimed_at)
            self._report_start()
        if output.prompt_logprobs is not None:
            entries = prompt_logprobs(
                self.tokenizer,
                self.texts,
                self.job.prompt_token_ids,
                output.prompt_logprobs,
                alternatives=self._prompt_alternatives,
                ranks=output.prompt_ranks,
            )
            encoded = [
                encode_logprobs(entries[start : start + LOGPROBS_AT_ONCE])
                for start in range(0, len(entries), LOGPROBS_AT_ONCE)
            ]
            self.outbox.prompts.append(PromptScored(self.job.handle, self.attempt, encoded))

    def _report_start(self) -> None:
        started = JobStarted(
            self.job.handle,
            self.attempt,
            self.prompt_tokens,
            self._cached_tokens,
            self.exactness_class,
        )
        self.outbox.start(started, is_streamed=self.job.stream)

    def _is_delta_due(self, sequence: Sequence, *, is_due: bool) -> bool:
        if self._is_gathered:
            return len(sequence.piece.token_ids) >= GATHERED_TOKENS
        return is_due or not sequence.was_sent

    def _send(self, sequence: Sequence) -> None:
        piece = sequence.take_piece()
        scores: dict[str, Any] = {}
        if not sequence.is_plain:
            score = sequence.cumulative_logprob if self._is_ranked else 0.0
            scores = {"logprobs": encode_logprobs(piece.logprobs), "cumulative_logprob": score}
            if sequence.pooled:
                scores["pooled"] = sequence.pooled
        for choice in range(self.job.n) if self._is_replicated else (sequence.index,):
            delta = Delta(
                self.job.handle,
                self.attempt,
                choice,
                piece.start,
                piece.text,
                piece.token_ids,
                sequence.finish_reason,
                sequence.stop_reason,
                **scores,
            )
            if piece.parsed_output is not None:
                delta = piece.parsed_output.added_to(delta)
            self.outbox.deltas.append(delta)

    def _finish(self) -> None:
        resumption = self.job.resumption
        earlier_ms = 0.0 if resumption is None else resumption.generation_ms
        first_token_at = self.claimed_at if self.first_token_at is None else self.first_token_at
        finished = JobFinished(
            self.job.handle,
            self.attempt,
            self.prompt_tokens,
            self.completion_tokens,
            self._cached_tokens,
            prefill_ms=(first_token_at - self.claimed_at) * 1000,
            generation_ms=earlier_ms + (time.monotonic() - first_token_at) * 1000,
            chosen=self._chosen() if self._is_ranked else [],
            engine=self.engine,
            exactness_class=self.exactness_class if self.first_token_at is not None else "",
            ended_at=clock.now_seconds(),
        )
        self.outbox.finish(finished, self.report, is_streamed=self.job.stream)

    def _chosen(self) -> list[int]:
        """Return the chosen sequences, best first; of equal ones, the lower index first."""
        if self.job.ranking is Ranking.SUM:
            ranked = sorted(self.sequences, key=lambda sequence: -sequence.cumulative_logprob)
        else:
            ranked = sorted(self.sequences, key=lambda sequence: -sequence.mean_logprob)
        return [sequence.index for sequence in ranked[: self.job.n]]

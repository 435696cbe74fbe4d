"""One claimed job: its sequences, which choices they answer, and what is told to the gateway when.

A sequence answers one choice, with three exceptions: greedy sequences would all be the same, so one of
them answers every choice; a job without completion tokens needs one sequence to read the prompt; and
where sequences are ranked, nothing is told before all of them have ended.
"""

import time
from itertools import count

import msgspec
from tokenizers import Tokenizer

from contract.messages import Delta, JobFinished, PromptScored, Ranking
from contract.outcomes import FinishReason
from contract.queue import Claim, LeaseReport, needed_tokens
from worker import telemetry
from worker.engine.base import EngineRequest, SequenceOutput
from worker.logprobs import TokenTexts, prompt_logprobs
from worker.replies import Outbox
from worker.sequence import Sequence
from worker.text import Detokenizer, StopStrings

GATHERED_TOKENS = 64
"""Tokens in one delta of a job that nobody reads along with."""

_LARGEST_SEED = 2**63 - 1

_sequence_ids = count(1)


class Generation:
    """Follows one job until its last sequence has ended."""

    def __init__(
        self, claim: Claim, outbox: Outbox, *, tokenizer: Tokenizer, texts: TokenTexts
    ) -> None:
        self.job = job = claim.job
        self.attempt = claim.attempt
        self.outbox = outbox
        self.is_prefilled = False
        self.prompt_tokens = len(job.prompt_token_ids)
        """Tokens of the prompt as the engine reads it: images take more than stand for them."""
        self._tokenizer = tokenizer
        self._texts = texts
        self._stops = StopStrings(job.stop) if job.stop else None
        self._claimed_at = time.monotonic()
        self._first_token_at = self._claimed_at
        self._cached_tokens = 0
        self._is_replicated = job.sampling.is_greedy or job.max_tokens == 0
        self._is_ranked = not self._is_replicated and (
            job.best_of > job.n or (job.ranking is Ranking.SUM and job.n > 1)
        )
        number = 1 if self._is_replicated else job.best_of
        self.sequences = [self._make_sequence(index) for index in range(number)]
        self.open_sequences = {sequence.id: sequence for sequence in self.sequences}

    def requests(self) -> list[EngineRequest]:
        """Return what the engine is to sample: one prompt, several seeds."""
        job = self.job
        logprobs = 0 if self._is_ranked and job.logprobs is None else job.logprobs
        return [
            EngineRequest(
                id=sequence.id,
                prompt_token_ids=job.prompt_token_ids,
                # An engine samples at least one token; that of a job that wants none is dropped.
                max_tokens=max(job.max_tokens, 1),
                sampling=job.sampling,
                seed=(job.sampling.seed + sequence.index) & _LARGEST_SEED,
                cache_salt=job.cache_salt,
                logprobs=logprobs if job.max_tokens else None,
                prompt_logprobs=(job.logprobs or 0)
                if job.score_prompt and sequence.index == 0
                else None,
                grammar=job.grammar if job.max_tokens else "",
                images=job.images,
                may_shorten=job.may_shorten,
                reads_prefix_cache=job.reads_prefix_cache,
            )
            for sequence in self.sequences
        ]

    def release_images(self) -> None:
        """Let go of the image files, which nobody needs any more once the engine has read them."""
        if self.job.images:
            self.job = msgspec.structs.replace(self.job, images=[])

    @property
    def is_done(self) -> bool:
        """Whether every sequence has ended."""
        return not self.open_sequences

    @property
    def takes_time_to_submit(self) -> bool:
        """Whether the engine looks longer at the job than others may be kept waiting."""
        spec = self.job.sampling
        has_breakers = spec.chain is not None and spec.chain.dry is not None
        return bool(self.job.images or self.job.grammar or spec.bad_words or has_breakers)

    @property
    def completion_tokens(self) -> int:
        """Completion tokens so far, of all sequences; a replicated one counts for every choice."""
        if not self.job.max_tokens:
            return 0
        tokens = sum(sequence.tokens for sequence in self.sequences)
        return tokens * self.job.n if self._is_replicated else tokens

    @property
    def age_seconds(self) -> float:
        """Time since the job was claimed."""
        return time.monotonic() - self._claimed_at

    @property
    def reserved_tokens(self) -> int:
        """KV-cache tokens that the job was admitted for and does not use yet."""
        seen = self.prompt_tokens if self.is_prefilled else 0
        seen += sum(sequence.tokens for sequence in self.sequences)
        return max(needed_tokens(self.job) - seen, 0)

    @property
    def report(self) -> LeaseReport:
        """What the queue is told with each lease extension and at the end."""
        return LeaseReport(
            self.job.id,
            self.attempt,
            self.completion_tokens,
            self.prompt_tokens if self.is_prefilled else 0,
            self._cached_tokens,
        )

    def receive(self, output: SequenceOutput, *, is_due: bool = True) -> bool:
        """Take in what a step added to one sequence. Return True if that ended it.

        Unless `is_due`, new text gathers for a later step.
        """
        sequence = self.open_sequences[output.sequence_id]
        if not self.is_prefilled or output.cached_tokens is not None:
            self._note_prefill(sequence, output)
        if not self.job.max_tokens:
            sequence.finish_reason = FinishReason.LENGTH
        else:
            sequence.receive(output)
        has_ended = sequence.finish_reason is not None
        if has_ended:
            del self.open_sequences[sequence.id]
        if not self._is_ranked and (
            has_ended or (sequence.piece.text and self._is_to_be_told(sequence, is_due=is_due))
        ):
            self._tell(sequence, self._choices(sequence))
        if has_ended and self.is_done:
            self._finish()
        return has_ended

    def _make_sequence(self, index: int) -> Sequence:
        job = self.job
        return Sequence(
            str(next(_sequence_ids)),
            index,
            Detokenizer(
                self._tokenizer,
                job.prompt_token_ids,
                shows_special_tokens=job.shows_special_tokens,
            ),
            job=job,
            stops=self._stops,
            texts=self._texts,
        )

    def _note_prefill(self, sequence: Sequence, output: SequenceOutput) -> None:
        if output.prompt_tokens is not None:
            self.prompt_tokens = output.prompt_tokens
        if not self.is_prefilled:
            self.is_prefilled = True
            self._first_token_at = time.monotonic()
            telemetry.PROMPT_TOKENS.inc(self.prompt_tokens)
        # Sequences after the first find the prompt in the cache because the first one put it there.
        if sequence.index == 0 and output.cached_tokens is not None:
            self._cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            entries = prompt_logprobs(
                self._tokenizer,
                self._texts,
                self.job.prompt_token_ids,
                output.prompt_logprobs,
                alternatives=self.job.logprobs or 0,
            )
            self.outbox.prompts.append(PromptScored(self.job.handle, self.attempt, entries))

    def _is_to_be_told(self, sequence: Sequence, *, is_due: bool) -> bool:
        if not self.job.stream:
            return len(sequence.piece.token_ids) >= GATHERED_TOKENS
        return is_due or not sequence.has_been_told

    def _choices(self, sequence: Sequence) -> range:
        if self._is_replicated:
            return range(self.job.n)
        return range(sequence.index, sequence.index + 1)

    def _tell(self, sequence: Sequence, choices: range) -> None:
        piece = sequence.take_piece()
        for choice in choices:
            self.outbox.deltas.append(
                Delta(
                    self.job.handle,
                    self.attempt,
                    choice,
                    piece.start,
                    piece.text,
                    piece.token_ids,
                    sequence.finish_reason,
                    sequence.stop_reason,
                    piece.logprobs or None,
                )
            )

    def _finish(self) -> None:
        if self._is_ranked:
            for choice, sequence in enumerate(self._ranked()[: self.job.n]):
                self._tell(sequence, range(choice, choice + 1))
        finished = JobFinished(
            self.job.handle,
            self.attempt,
            self.prompt_tokens,
            self.completion_tokens,
            self._cached_tokens,
            prefill_ms=(self._first_token_at - self._claimed_at) * 1000,
            generation_ms=(time.monotonic() - self._first_token_at) * 1000,
        )
        self.outbox.finish(finished, self.report)

    def _ranked(self) -> list[Sequence]:
        """Return all sequences, the best first; of equal ones the one with the lower index."""
        if self.job.ranking is Ranking.SUM:
            return sorted(self.sequences, key=lambda sequence: -sequence.cumulative_logprob)
        return sorted(self.sequences, key=lambda sequence: -sequence.mean_logprob)

"""Preemption: batch jobs leave the engine when requests need their room.

A preempted job returns to its gateway with its tokens, like a job of a stopping worker. It resumes
after its last token when no request waits.
"""

import time
from collections.abc import Sequence

from contract.messages import ReturnReason
from contract.queue import Room
from worker import telemetry
from worker.engine.base import Engine
from worker.execution.generation import RunningJob
from worker.execution.jobs import RunningJobs

BATCH_PROMPT_TOKENS = 2_048
"""Prompt tokens of batch jobs that the engine processes at once.

A longer prompt is processed alone.
"""

BATCH_PROMPT_TOKENS_BESIDE_REQUESTS = 8
"""BATCH_PROMPT_TOKENS while requests run, for each sequence of the engine: first tokens of requests
wait for these prompts.

This keeps the sequences full of batch jobs whose prompts have up to eight times as many tokens as
their completions.
"""

LEAST_FREE_SHARE, MOST_FREE_SHARE = 1 / 8, 5 / 16
"""Batch jobs leave as many sequences free as requests use, so that most requests preempt none.

These are the least and the most, as shares of the engine's sequences.
"""


class Preemption:
    """The room of an engine, and the batch jobs that make room.

    Args:
        share: Share of the engine's sequences that are preempted in a second, at most.
    """

    def __init__(self, engine: Engine, jobs: RunningJobs, *, share: float) -> None:
        self._info = engine.info
        self._jobs = jobs
        self._rate = share * engine.info.max_sequences
        self._allowance = max(self._rate, 1.0) if share else 0.0
        """Sequences that may be preempted now; negative after a job with more sequences."""
        self._renewed_at = time.monotonic()

    @property
    def pause_seconds(self) -> float:
        """Time until the next batch job may be preempted; 0 if one may be or none runs."""
        if not self._jobs.batch or not self._rate:
            return 0.0
        return max(1.0 - self._allowance, 0.0) / self._rate

    def room(self) -> Room:
        """Return the free room, and the room of batch jobs that may be preempted now."""
        jobs, most_sequences = self._jobs, self._info.max_sequences
        candidates = self._candidates()
        unprocessed = sum(
            len(each.job.prompt_token_ids)
            for each in jobs.batch.values()
            if each.first_token_at is None
        )
        of_requests = jobs.sequences - sum(len(e.open_sequences) for e in jobs.batch.values())
        least, most = (int(e * most_sequences) for e in (LEAST_FREE_SHARE, MOST_FREE_SHARE))
        kept_free = min(max(of_requests, least), most)
        preemptible = sum(len(each.open_sequences) for each in candidates)
        return Room(
            tokens=self._free_tokens(),
            sequences=most_sequences - jobs.sequences - kept_free,
            most_sequences=self._most_sequences,
            empty=len(candidates) == len(jobs.by_id),
            preemptible_tokens=sum(each.held_tokens for each in candidates),
            preemptible_sequences=preemptible + kept_free,
            batch_prompt_tokens=self._batch_prompt_tokens - unprocessed,
        )

    def make_room(self, started: Sequence[RunningJob]) -> None:
        """Return batch jobs, youngest first, until the started jobs have room."""
        requests = [len(each.open_sequences) for each in started if not each.is_preemptible]
        if not requests or not self._jobs.batch:
            return
        excess = sum(requests) - sum(min(each, self._most_sequences) for each in requests)
        sequences = self._jobs.sequences - excess - self._info.max_sequences
        tokens = -self._free_tokens()
        for generation in self._candidates():
            if sequences <= 0 and tokens <= 0:
                return
            sequences -= len(generation.open_sequences)
            tokens -= generation.held_tokens
            self._preempt(generation)

    def _preempt(self, generation: RunningJob) -> None:
        self._allowance -= len(generation.open_sequences)
        telemetry.PREEMPTED_SEQUENCES.inc(len(generation.open_sequences))
        telemetry.PREEMPTED_TOKENS.inc(sum(e.tokens for e in generation.open_sequences.values()))
        self._jobs.return_job(generation, ReturnReason.PREEMPTED)

    def _candidates(self) -> list[RunningJob]:
        """Return the batch jobs that may be preempted now, youngest first."""
        now = time.monotonic()
        renewed = self._allowance + (now - self._renewed_at) * self._rate
        self._allowance = min(renewed, max(self._rate, 1.0))
        self._renewed_at = now
        candidates, allowance = [], self._allowance
        for generation in reversed(self._jobs.batch.values()):
            if allowance < 1.0:
                break
            allowance -= len(generation.open_sequences)
            candidates.append(generation)
        return candidates

    @property
    def _batch_prompt_tokens(self) -> int:
        if len(self._jobs.batch) == len(self._jobs.by_id):
            return BATCH_PROMPT_TOKENS
        beside = BATCH_PROMPT_TOKENS_BESIDE_REQUESTS * self._info.max_sequences
        return min(beside, BATCH_PROMPT_TOKENS)

    @property
    def _most_sequences(self) -> int:
        return max(1, self._info.max_sequences // 4)

    def _free_tokens(self) -> int:
        jobs, tokens = self._jobs, self._info.kv_cache_tokens
        # The engine's last report is stale once the engine has nothing left to step.
        used = jobs.kv_usage * tokens if jobs.by_id else 0.0
        return int(tokens - used - jobs.reserved_tokens)

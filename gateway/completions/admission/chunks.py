"""Chunks of long prompts in Redis: written once, for all turns of a chat that repeat them."""

import time
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

import msgspec
from redis.exceptions import RedisError

from common import clock
from contract.messages import GenerationJob, WorkerCard
from contract.prompts import CHUNK_BYTES, chunk_names
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.completions.stored.store import DEADLINE_GRACE_MS
from gateway.limits.stored_bytes import Holder, Storage, Use, allocated
from gateway.models.catalogue import Catalogue
from gateway.platform import telemetry
from gateway.platform.settings import Settings
from gateway.records.errors import RateLimitError, StoreUnavailableError
from gateway.records.limits import SubjectLimits

KEPT_SECONDS: Final = 600.0
"""Time for which chunks are kept at once, if further jobs use them."""
MOST_KNOWN: Final = 65_536
"""Chunks that a gateway knows Redis to have. It asks Redis about others."""
_STORED_BYTES: Final = allocated([CHUNK_BYTES]) + 256
"""Memory of a chunk, with its key."""


@dataclass(eq=False)
class PromptChunks:
    """Stores the chunks of jobs, for longer than any job or stream refers to them."""

    _settings: Settings
    _catalogue: Catalogue
    _dispatcher: Dispatcher
    _storage: Storage

    _known: dict[tuple[str, bytes], float] = field(default_factory=dict, init=False)
    """Model and name -> monotonic time until which Redis keeps the chunk for long enough."""
    _lost_prompts: int = field(default=0, init=False)

    async def put(
        self,
        jobs: list[GenerationJob],
        names: list[bytes],
        card: WorkerCard,
        subjects: tuple[SubjectLimits, ...],
    ) -> list[GenerationJob]:
        """Return the jobs to enqueue, with their `chunks` if Redis has these now.

        `names` are those of long prompts, and empty for others.

        Chunks count as bytes that the subjects store, once for each gateway that uses them. If they
        find no room, or a job may wait for longer than they are kept, its prompt is sent whole.
        """
        latest_ms = clock.now_ms() + _ms(self._settings.request_timeout.total_seconds())
        if not any(names):
            return jobs
        named = [
            msgspec.structs.replace(job, chunks=own) if job.deadline_ms <= latest_ms else job
            for job, own in zip(jobs, names, strict=True)
        ]
        try:
            for job in named:
                if missing := self._missing(job, card.model):
                    await self._write(job, card.model, missing, subjects)
        except (RateLimitError, StoreUnavailableError, RedisError, OSError):
            return jobs
        return named

    def _missing(self, job: GenerationJob, model: str) -> dict[bytes, int]:
        """Return the names of the job's chunks that Redis may lack, and their numbers."""
        if not job.chunks:
            return {}
        if self._lost_prompts != self._dispatcher.lost_prompts:
            # It has lost some, and perhaps all.
            self._lost_prompts = self._dispatcher.lost_prompts
            self._known.clear()
        now, known = time.monotonic(), self._known
        names = chunk_names(job.chunks, job.rest)
        return {name: at for at, name in enumerate(names) if known.get((model, name), 0.0) <= now}

    async def _write(
        self,
        job: GenerationJob,
        model: str,
        missing: dict[bytes, int],
        subjects: tuple[SubjectLimits, ...],
    ) -> None:
        settings, queue, known = self._settings, self._catalogue.queue(model), self._known
        longest = settings.request_timeout + settings.answer_retention
        ttl_ms = _ms(longest.total_seconds() + KEPT_SECONDS) + DEADLINE_GRACE_MS
        # Counted first: a gateway may die before it enqueues the job. The last name stands for all
        # that are new with it, which this gateway will also keep together.
        holder = Holder(job.tenant, subjects, f"chunks:{[*missing][-1].hex()}")
        size = _STORED_BYTES * len(missing)
        await self._storage.take(holder, size, live_ms=ttl_ms, use=Use.OPTIONAL)
        until = time.monotonic() + KEPT_SECONDS
        # One is rarely known to Redis, nor are others after one that is not.
        several = [*missing] if len(missing) > 1 else []
        kept = await queue.keep_chunks(several[:1], ttl_ms=ttl_ms)
        if any(kept):
            kept += await queue.keep_chunks(several[1:], ttl_ms=ttl_ms)
        content = memoryview(job.prompt_token_ids).cast("B")
        chunks = {
            name: bytes(content[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])
            for (name, number), is_kept in zip_longest(missing.items(), kept)
            if not is_kept
        }
        await queue.write_chunks(chunks, ttl_ms=ttl_ms)
        for name in missing:
            known.pop((model, name), None)
            known[model, name] = until
        while len(known) > MOST_KNOWN:
            del known[next(iter(known))]
        telemetry.PROMPT_CHUNKS.labels("kept").inc(len(missing) - len(chunks))
        telemetry.PROMPT_CHUNKS.labels("written").inc(len(chunks))


def _ms(seconds: float) -> int:
    return int(seconds * 1000)

"""Chunks of long prompts, which later turns of a chat repeat: kept in memory or read again."""

import logging
from collections import defaultdict
from collections.abc import Iterable

from redis.exceptions import RedisError

from contract.messages import GenerationJob, about
from contract.prompts import CHUNK_BYTES, chunk_names
from contract.queue import JobQueue
from worker import telemetry

_log = logging.getLogger(__name__)


class PromptChunks:
    """The chunks that one worker has in memory, at most `most_bytes` bytes.

    If there is no more room, the tenant with most chunks loses the one that it used least recently.
    """

    def __init__(self, queue: JobQueue, *, most_bytes: int) -> None:
        self._queue = queue
        self._most = most_bytes // CHUNK_BYTES
        self._number = 0
        self._held: defaultdict[str, dict[bytes, bytes]] = defaultdict(dict)
        """Chunks by name for each tenant, in the order of their last use."""

    async def whole(self, job: GenerationJob) -> GenerationJob | None:
        """Return a job with its whole prompt; None if it cannot be read."""
        if not job.chunks:
            return job
        names, held = chunk_names(job.chunks, job.rest), self._held[job.tenant]
        known = {name: held[name] for name in names if name in held}
        try:
            whole, chunks = await self._queue.with_prompt(job, known)
        except (RedisError, OSError) as error:
            _log.warning("Cannot read a prompt: %s", type(error).__name__)
            whole, chunks = None, {}
        self._drop(job.tenant, names)
        if whole is None:
            telemetry.PROMPT_CHUNKS.labels("lost").inc(len(names) - len(known))
            _log.warning("Job %s: its prompt is incomplete", job.id, extra=about(job))
            return None
        telemetry.PROMPT_CHUNKS.labels("held").inc(len(known))
        telemetry.PROMPT_CHUNKS.labels("read").inc(len(names) - len(known))
        self._keep(job.tenant, chunks)
        return whole

    def _keep(self, tenant: str, chunks: dict[bytes, bytes]) -> None:
        self._held[tenant].update(chunks)
        self._number += len(chunks)
        while self._number > self._most:
            most = max(self._held, key=lambda each: len(self._held[each]))
            self._drop(most, [next(iter(self._held[most]))])

    def _drop(self, tenant: str, names: Iterable[bytes]) -> None:
        held = self._held[tenant]
        self._number -= sum(held.pop(name, None) is not None for name in names)
        if not held:
            del self._held[tenant]

"""What a worker holds for jobs, as Redis has it for claims: digests of `contract.affinity`."""

from contract.affinity import MOST_HELD
from contract.queue import JobQueue
from worker import telemetry

CARD_TTL_MS = 5_000
"""Lifetime of the worker's card and of what it holds. Announcements of the worker extend it."""


class HeldDigests:
    """The digests of one worker, and their changes since the last publication.

    Engines add and remove digests of prefixes. Whatever else makes a worker prefer jobs, such as a
    loaded adapter, is added under its `resource_digest`.
    """

    def __init__(self, queue: JobQueue, worker: str) -> None:
        self._queue = queue
        self._worker = worker
        self._held: dict[bytes, None] = {}
        self._kept = b""
        self._published: set[bytes] = set()
        self._changed: dict[bytes, None] = {}
        self._is_lost = False

    def __len__(self) -> int:
        return len(self._held)

    def add(self, digest: bytes) -> None:
        """Hold a digest. If there are too many, the oldest one is dropped."""
        if digest in self._held:
            return
        if len(self._held) >= MOST_HELD:
            self.remove(next(each for each in self._held if each != self._kept))
        self._held[digest] = self._changed[digest] = None

    def keep(self, digest: bytes) -> None:
        """Hold a digest that is never dropped for others, in place of an earlier one."""
        if digest != self._kept:
            self.remove(self._kept)
        self._kept = digest
        self.add(digest)

    def remove(self, digest: bytes) -> None:
        """Hold a digest no longer; an unknown one is ignored."""
        if digest in self._held:
            del self._held[digest]
            self._changed[digest] = None

    def clear(self) -> None:
        """Hold nothing, for example after the engine's death."""
        self._changed.update(self._held)
        self._held.clear()

    def check(self, known: int) -> None:
        """Publish everything again if Redis does not have as many digests as were published."""
        self._is_lost = self._is_lost or known != len(self._published)

    async def publish(self) -> None:
        """Send the changes to Redis, if there are any. Raises RedisError."""
        if self._is_lost:
            self._published.clear()
            self._changed = dict(self._held)
        elif not self._changed:
            return
        changed, self._changed = self._changed, {}
        removed = [each for each in changed if each in self._published and each not in self._held]
        added = [each for each in changed if each in self._held and each not in self._published]
        starts_over, self._is_lost = self._is_lost, True
        known = await self._queue.hold(
            self._worker,
            removed=removed,
            added=added,
            starts_over=starts_over,
            ttl_ms=CARD_TTL_MS,
        )
        self._is_lost = False
        self._published.difference_update(removed)
        self._published.update(added)
        self.check(known)
        telemetry.HELD_DIGESTS.set(len(self._published))

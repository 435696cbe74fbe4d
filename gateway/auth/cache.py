"""Bounded in-memory cache for database look-ups, with invalidation of changed entries."""

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from gateway.records.errors import StoreUnavailableError

ABSENT_SECONDS: Final = 1.0
"""How long a negative result is cached; a new key must soon work."""
MAX_ABSENT: Final = 10_000
STALE_SECONDS: Final = 3600.0
"""Maximum age of an entry that is used while the database is unavailable."""
REFRESH_PATIENCE_SECONDS: Final = 0.5
"""How long a request waits for the database if a stale entry is available."""
RETRY_SECONDS: Final = 2.0
"""How long a stale entry is used without another query after a database failure."""

K = TypeVar("K")
V = TypeVar("V")
Load = Callable[[], Awaitable[V | None]]


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    loaded_at: float
    fresh_until: float


@dataclass(eq=False, kw_only=True)
class LookupCache(Generic[K, V]):
    """Caches the results of look-ups and evicts the least recently used ones.

    Args:
        ttl_seconds: how long a result is fresh.
        max_entries: maximum number of results.
        subjects: returns the names that a result depends on, for `drop`.
        monotonic: clock in seconds.
    """

    ttl_seconds: float
    max_entries: int
    subjects: Callable[[V], Iterable[str]]
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        self._by_subject: defaultdict[str, set[K]] = defaultdict(set)
        self._absent_until: OrderedDict[K, float] = OrderedDict()
        self._loading: dict[K, asyncio.Task[V | None]] = {}
        self._changes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def fresh(self, key: K) -> V | None:
        """Return the cached result if it is still fresh."""
        entry = self._entries.get(key)
        if entry is None or self.monotonic() >= entry.fresh_until:
            return None
        self._entries.move_to_end(key)
        return entry.value

    async def get(self, key: K, load: Load[V]) -> V | None:
        """Return the result, calling `load` if it is not cached; None if nothing exists.

        `load` raises StoreUnavailableError if the database is unavailable. A result that is not
        older than STALE_SECONDS is then used; without one the error propagates.
        """
        value = self.fresh(key)
        if value is not None:
            return value
        if self.monotonic() < self._absent_until.get(key, 0.0):
            return None
        entry = self._entries.get(key)
        if entry is None or self.monotonic() - entry.loaded_at > STALE_SECONDS:
            return await self._shared_load(key, load)
        return await self._refresh(key, load, entry)

    def drop(self, subject: str) -> None:
        """Drop every result that depends on the subject, including those being loaded."""
        self._distrust_loads()
        for key in self._by_subject.pop(subject, ()):
            self._remove(key)

    def expire_all(self) -> None:
        """Expire every result, so that the database confirms it before its next use."""
        self._distrust_loads()
        self._absent_until.clear()
        for entry in self._entries.values():
            entry.fresh_until = 0.0

    async def _refresh(self, key: K, load: Load[V], entry: _Entry[V]) -> V | None:
        try:
            async with asyncio.timeout(REFRESH_PATIENCE_SECONDS):
                return await self._shared_load(key, load)
        except (TimeoutError, StoreUnavailableError):
            if self._entries.get(key) is not entry:
                # The entry was dropped or replaced meanwhile, so it must not be used any more.
                return await self.get(key, load)
            entry.fresh_until = self.monotonic() + RETRY_SECONDS
            return entry.value

    async def _shared_load(self, key: K, load: Load[V]) -> V | None:
        task = self._loading.get(key)
        if task is None:
            task = asyncio.create_task(self._load(key, load))
            self._loading[key] = task
            task.add_done_callback(lambda done: self._loaded(key, done))
        # Other requests may wait for the same load, so a client that disconnects must not cancel
        # it.
        return await asyncio.shield(task)

    async def _load(self, key: K, load: Load[V]) -> V | None:
        changes = self._changes
        value = await load()
        # Data read before a change was announced is valid for current waiters, not for later ones.
        if changes == self._changes:
            self._keep(key, value)
        return value

    def _loaded(self, key: K, task: asyncio.Task[V | None]) -> None:
        if self._loading.get(key) is task:
            del self._loading[key]
        if not task.cancelled():
            # Retrieve the exception, or asyncio logs it if every waiter was cancelled.
            task.exception()

    def _keep(self, key: K, value: V | None) -> None:
        self._remove(key)
        now = self.monotonic()
        if value is None:
            self._absent_until[key] = now + ABSENT_SECONDS
            self._absent_until.move_to_end(key)
            if len(self._absent_until) > MAX_ABSENT:
                self._absent_until.popitem(last=False)
            return
        self._absent_until.pop(key, None)
        self._entries[key] = _Entry(value, now, now + self.ttl_seconds)
        for subject in self.subjects(value):
            self._by_subject[subject].add(key)
        if len(self._entries) > self.max_entries:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        for subject in self.subjects(entry.value):
            keys = self._by_subject.get(subject, set())
            keys.discard(key)
            if not keys:
                self._by_subject.pop(subject, None)

    def _distrust_loads(self) -> None:
        self._changes += 1
        self._loading.clear()

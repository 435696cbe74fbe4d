"""A cache in front of the database: bounded, with a way to drop what has changed."""

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from gateway.errors import StoreUnavailableError

ABSENT_SECONDS: Final = 1.0
"""How long it is believed that something does not exist; a key made just now must soon work."""
MAX_ABSENT: Final = 10_000
STALE_SECONDS: Final = 3600.0
"""Age up to which an entry is used while the database cannot answer."""
REFRESH_PATIENCE_SECONDS: Final = 0.5
"""How long a request waits for the database when an older entry could serve it."""
RETRY_SECONDS: Final = 2.0
"""How long an older entry serves without asking a database that has just failed."""

K = TypeVar("K")
V = TypeVar("V")
Load = Callable[[], Awaitable[V | None]]


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    loaded_at: float
    fresh_until: float


class LookupCache(Generic[K, V]):
    """Keeps the results of look-ups, the least recently used leaving first.

    Args:
        ttl_seconds: how long a result is believed.
        max_entries: results kept at most.
        subjects: names of the things a result depends on, for `forget`.
        monotonic: clock in seconds.
    """

    def __init__(
        self,
        *,
        ttl_seconds: float,
        max_entries: int,
        subjects: Callable[[V], Iterable[str]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_seconds = ttl_seconds
        self._max_entries = max_entries
        self._subjects = subjects
        self._monotonic = monotonic
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        self._by_subject: defaultdict[str, set[K]] = defaultdict(set)
        self._absent_until: OrderedDict[K, float] = OrderedDict()
        self._loading: dict[K, asyncio.Task[V | None]] = {}
        self._changes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def fresh(self, key: K) -> V | None:
        """Return the result if it is known and may still be believed."""
        entry = self._entries.get(key)
        if entry is None or self._monotonic() >= entry.fresh_until:
            return None
        self._entries.move_to_end(key)
        return entry.value

    async def get(self, key: K, load: Load[V]) -> V | None:
        """Return the result, asking `load` where it is not known; None where nothing exists.

        `load` raises StoreUnavailableError when the database cannot answer. Then a result that is not
        older than STALE_SECONDS is used, and without one the error is passed on.
        """
        value = self.fresh(key)
        if value is not None:
            return value
        if self._monotonic() < self._absent_until.get(key, 0.0):
            return None
        entry = self._entries.get(key)
        if entry is None or self._monotonic() - entry.loaded_at > STALE_SECONDS:
            return await self._shared_load(key, load)
        return await self._refresh(key, load, entry)

    def forget(self, subject: str) -> None:
        """Drop every result that depends on the subject, those being loaded included."""
        self._distrust_loads()
        for key in self._by_subject.pop(subject, ()):
            self._remove(key)

    def expire_all(self) -> None:
        """Have every result confirmed by the database before it is used again."""
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
                # It was dropped or replaced meanwhile, so it must not serve any more.
                return await self.get(key, load)
            entry.fresh_until = self._monotonic() + RETRY_SECONDS
            return entry.value

    async def _shared_load(self, key: K, load: Load[V]) -> V | None:
        task = self._loading.get(key)
        if task is None:
            task = asyncio.create_task(self._load(key, load))
            self._loading[key] = task
            task.add_done_callback(lambda done: self._loaded(key, done))
        # Others may wait for the same load, so a client that goes away must not end it.
        return await asyncio.shield(task)

    async def _load(self, key: K, load: Load[V]) -> V | None:
        changes = self._changes
        value = await load()
        # What was read before a change became known is good for those who waited, not for later ones.
        if changes == self._changes:
            self._keep(key, value)
        return value

    def _loaded(self, key: K, task: asyncio.Task[V | None]) -> None:
        if self._loading.get(key) is task:
            del self._loading[key]
        if not task.cancelled():
            # All who waited may be gone; asyncio would complain about an error that nobody took.
            task.exception()

    def _keep(self, key: K, value: V | None) -> None:
        self._remove(key)
        now = self._monotonic()
        if value is None:
            self._absent_until[key] = now + ABSENT_SECONDS
            self._absent_until.move_to_end(key)
            if len(self._absent_until) > MAX_ABSENT:
                self._absent_until.popitem(last=False)
            return
        self._absent_until.pop(key, None)
        self._entries[key] = _Entry(value, now, now + self._ttl_seconds)
        for subject in self._subjects(value):
            self._by_subject[subject].add(key)
        if len(self._entries) > self._max_entries:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        for subject in self._subjects(entry.value):
            keys = self._by_subject.get(subject, set())
            keys.discard(key)
            if not keys:
                self._by_subject.pop(subject, None)

    def _distrust_loads(self) -> None:
        self._changes += 1
        self._loading.clear()

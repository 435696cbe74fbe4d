"""Limit the memory of request bodies that a gateway is reading, per sender and in total."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from gateway.errors import TenantQueueFullError

RETRY_AFTER_SECONDS: Final = 1.0
SENDERS: Final = 4
"""Senders that may hold their most at the same time. Beyond, each gets less."""


class Intake:
    """The bodies being read, with a byte limit per sender."""

    def __init__(self, *, most_bytes: int) -> None:
        """Limit the bodies of each sender to `most_bytes` in total.

        A sender may also hold no more than what is free, so that another one always finds some.
        """
        self._most_bytes = most_bytes
        self._held: Counter[str] = Counter()
        self._total = 0

    @contextmanager
    def body_of(self, sender: str) -> Iterator[Callable[[int], None]]:
        """Count the bytes of one body until the context ends.

        Call the returned function with the size of each part. It raises TenantQueueFullError when
        the limit is exceeded.
        """
        size = 0

        def add(more: int) -> None:
            nonlocal size
            most = min(self._most_bytes, SENDERS * self._most_bytes - self._total)
            if self._held[sender] + more > most:
                raise TenantQueueFullError(
                    f"Bodies of concurrent requests must have at most {most} bytes in "
                    f"total. Given: {self._held[sender] + more}.",
                    retry_after_seconds=RETRY_AFTER_SECONDS,
                )
            self._held[sender] += more
            self._total += more
            size += more

        try:
            yield add
        finally:
            self._held[sender] -= size
            self._total -= size
            if not self._held[sender]:
                del self._held[sender]

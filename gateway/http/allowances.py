"""Limits of this gateway for uses without a quota: unpaid requests, failed logins and bodies."""

import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from gateway.http.exchange import Exchange
from gateway.records.errors import TenantQueueFullError, TooManyUnpaidError
from gateway.records.principal import Principal

MAX_CALLERS: Final = 100_000
"""Maximum callers with a stored count; above it, the least recent caller is dropped."""
BYTES_OF_USE: Final = 16_384
"""Bytes of an unpaid body that count as one more request, because reading and checking them takes
as long."""
_ROUNDING: Final = 1e-6
_IPV6_PREFIX: Final = 64
"""Prefix length of the smallest network that one client has."""

RETRY_AFTER_SECONDS: Final = 1.0
SENDERS: Final = 4
"""Senders that may hold their most at the same time. Beyond, each gets less."""


@dataclass(eq=False)
class Allowance:
    """A rate limit for each caller: a leaky bucket that holds the requests of one minute."""

    per_minute: int
    """The limit; 0 for none."""
    code: str
    """Code of the error when the limit is exceeded."""
    what: str
    """Plural noun for what the limit counts, for the error message."""
    monotonic: Callable[[], float] = time.monotonic
    """Clock in seconds."""
    _used: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)
    """Use per caller, and the time at which this value was current."""

    def is_left(self, caller: str) -> bool:
        """Whether a caller is below the limit."""
        # Most callers have no entry.
        if caller not in self._used or self.per_minute == 0:
            return True
        # One whole use: a part of one is there at any time, so that it would limit nobody.
        return self._now_used(caller) <= self.per_minute - 1 + _ROUNDING

    def require(self, caller: str) -> None:
        """Raise TooManyUnpaidError if a caller has reached the limit."""
        if not self.is_left(caller):
            most = self.per_minute
            raise TooManyUnpaidError(
                f"{self.what} are limited to {most} per minute.",
                code=self.code,
                retry_after_seconds=(self._now_used(caller) - most + 1) * 60 / most,
            )

    def use(self, caller: str, times: int = 1) -> None:
        """Count uses of a caller; -1 revokes one."""
        if self.per_minute == 0 or times == 0 or (times < 0 and caller not in self._used):
            return
        used = self._now_used(caller) + times
        if used <= 0:
            self._used.pop(caller, None)
            return
        # Also what exceeds the limit, such as the bytes of a large body, has to drain.
        self._used[caller] = (used, self.monotonic())
        self._used.move_to_end(caller)
        if len(self._used) > MAX_CALLERS:
            self._used.popitem(last=False)

    def _now_used(self, caller: str) -> float:
        used, at = self._used.get(caller, (0.0, 0.0))
        return max(0.0, used - (self.monotonic() - at) * self.per_minute / 60)


@lru_cache(maxsize=10_000)
def network_of(address: str) -> str:
    """Return the network that counts as one client: an IPv4 address or an IPv6 /64."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv4Address) or known.ipv4_mapped is not None:
        return address
    return str(ipaddress.ip_network((known, _IPV6_PREFIX), strict=False))


@dataclass(eq=False)
class UnpaidRequests(Allowance):
    """The limit of a key's requests that no quota counts."""

    code: str = "unpaid_requests"
    what: str = "Unpaid requests (failed, estimate, tokenize and response requests)"

    def admit(self, exchange: Exchange, principal: Principal, *, is_paid: bool = False) -> None:
        """Count an unpaid request; one that `is_paid` counts only if it fails.

        Raises TooManyUnpaidError if its key has reached the limit.
        """
        caller = f"{principal.tenant_id} {principal.credential_id}"
        self.require(caller)
        exchange.caller, exchange.is_paid = caller, is_paid
        if not is_paid:
            self.use(caller)

    def count(self, exchange: Exchange, *, is_fault: bool = False) -> None:
        """Count the bytes read from the body of an unpaid request.

        If `is_fault`, the request itself counts too, unless it has been counted. Nothing counts
        before `admit`.
        """
        if exchange.caller:
            uses = exchange.body_bytes // BYTES_OF_USE + (is_fault and exchange.is_paid)
            exchange.body_bytes = 0
            self.use(exchange.caller, uses)


@dataclass(eq=False)
class FailedLogins(Allowance):
    """The limit of a network's invalid credentials."""

    code: str = "failed_logins"
    what: str = "Invalid credentials from one network"


@dataclass(eq=False)
class BodyBytes:
    """The bodies being read, with a byte limit per sender."""

    most_bytes: int
    """The most that one sender may hold. It may also hold no more than what is free, so that
    another one always finds some."""
    _held: Counter[str] = field(default_factory=Counter)
    _total: int = 0

    @contextmanager
    def body_of(self, sender: str) -> Iterator[Callable[[int], None]]:
        """Count the bytes of one body until the context ends.

        Call the returned function with the size of each part. It raises TenantQueueFullError when
        the limit is exceeded.
        """
        size = 0

        def add(more: int) -> None:
            nonlocal size
            most = min(self.most_bytes, SENDERS * self.most_bytes - self._total)
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

"""Storage quota: bytes in Redis of waiting and running requests and of stored responses.

Callers measure what they write with `allocated`, and count it here. What is not counted has a bound
for each tenant (docs/limits-and-ledger.md).
"""

import logging
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
from redis.exceptions import RedisError

from common import clock
from common.tasks import TaskSet, wait_for_end
from contract import keys
from contract.scripts import CommandExecutor, LuaScript
from contract.scripts.cluster import ask_every_server
from gateway.limits.refusals import refusal_error
from gateway.limits.replies import Refused
from gateway.records.errors import queue_unavailable
from gateway.records.limits import LimitName, LimitScope, SubjectLimits

SMALL_BYTES: Final = 16_384
"""Smaller requests are not counted while they run, because their number is bounded."""
SMALL_STEP: Final = 16_384
"""Bytes of small responses of a tenant after which its sum is read: they count at their end."""
MOST_TENANTS: Final = 10_000
"""Tenants whose small responses are added up."""
NEAR: Final = 0.5
"""Part of its limit beyond which a tenant's small requests are counted one by one."""
USER_BYTES: Final = 640
"""Of the account of an end user, with its key and what counts it."""
LEAST_BYTES: Final = 1_048_576
"""A tenant may store this much as long as Redis has memory for requests that are not stored."""
MEMORY_SECONDS: Final = 1.0
"""How often the memory of Redis is read. Its maximum may change, too."""
OLD_SECONDS: Final = 10.0
"""What was read longer ago does not count. Then requests wait for the memory to be read."""
LOOK_SECONDS: Final = 0.25
"""How long a request waits for this; then it is decided by what was read before."""

_VALUE_BYTES: Final = 10
"""The most that Redis adds to a value."""
_LEAST_STEP: Final = 16


class Use(float, Enum):
    """What bytes are for, and the part of Redis's memory beyond which it takes no more of them.

    The last tenth is for settlements, leases and everything else that is small.
    """

    OPTIONAL = 0.5
    STORED = 0.75
    RUNNING = 0.9  # Requests that are not stored.


def allocated(sizes: Iterable[int]) -> int:
    """Return the bytes that Redis allocates for values of these sizes.

    These are jemalloc's size classes, of which a power of two has four. Other allocators need less.
    """
    total = 0
    for size in sizes:
        needed = size + _VALUE_BYTES
        step = max(_LEAST_STEP, 1 << max((needed - 1).bit_length() - 3, 0))
        total += -(-needed // step) * step
    return total


_KEEP = LuaScript("request_keep", "gateway.limits.scripts")

logger = logging.getLogger(__name__)


class Holder(NamedTuple):
    """A request whose bytes are counted, and the subjects that they count for."""

    tenant_id: str
    subjects: Sequence[SubjectLimits]
    request_id: str


def counted_for(subjects: Sequence[SubjectLimits]) -> list[SubjectLimits]:
    """Return the subjects for which stored bytes count."""
    return [
        each
        for each in subjects
        if each.spending is None
        and (each.scope is LimitScope.TENANT or each.limits.stored_bytes is not None)
    ]


@lru_cache(maxsize=10_000)
def names_of_counted(subjects: tuple[SubjectLimits, ...]) -> tuple[str, ...]:
    """Return the names of the subjects for which stored bytes count."""
    return tuple(each.subject for each in counted_for(subjects))


class Storage:
    """Counts and limits the bytes of tenants, projects and keys in Redis.

    It always counts for the tenant, and for the project and the key if their `stored_bytes` are
    limited. All subjects of one call belong to the same tenant.

    A tenant's limit is at most half of the free memory that Redis has for the use of its bytes. So
    one tenant can take a third of that memory, and each of five tenants a seventh: together they
    never take all of it.
    """

    def __init__(self, executor: CommandExecutor, *, most_of_tenant: int) -> None:
        """Limit each tenant without its own limit to `most_of_tenant` bytes."""
        self._executor = executor
        self._most_of_tenant = most_of_tenant
        self._tasks = TaskSet()
        self._look_at = self._old_at = 0.0
        self._memory: list[tuple[int, int]] = []
        """Used and maximum bytes of each server, as last read."""
        self._taken = self._taken_before = 0
        """Bytes taken since then, and in the period before: Redis may not have these either."""
        self._unread: dict[str, int] = {}
        """Bytes of small responses of a tenant since its sum was read."""
        self._near: set[str] = set()
        """Tenants that used more than NEAR of their limits when they were last counted."""

    def in_force(self, subject: SubjectLimits, use: Use = Use.STORED) -> SubjectLimits:
        """Return a subject with its effective `stored_bytes`: a tenant always has a limit."""
        limits = subject.limits
        if subject.scope is not LimitScope.TENANT:
            return subject
        own = self._most_of_tenant if limits.stored_bytes is None else limits.stored_bytes
        return replace(subject, limits=replace(limits, stored_bytes=min(own, self._room(use))))

    def _room(self, use: Use) -> int:
        """Return the most that a tenant may store for this use, as the memory was last read."""
        taken = self._taken + self._taken_before
        left = [most * use - used - taken for used, most in self._memory if most]
        room = max(int(min(left) / 2), 0) if left else sys.maxsize
        if use is Use.STORED and room < LEAST_BYTES:
            return max(room, min(LEAST_BYTES, self._room(Use.RUNNING)))
        return room

    async def take(
        self,
        holder: Holder,
        size: int,
        *,
        live_ms: int,
        use: Use = Use.STORED,
        before: int = 0,
        is_brief: bool = False,
        is_account: bool = False,
    ) -> int:
        """Count the bytes of a request, for at most `live_ms` milliseconds; return what counts.

        Small requests that are not stored do not count. Small ones that are stored `is_brief`ly
        count from their end on, unless the tenant is near its limit. `before` is what counts of
        this request already. With `is_account`, the holder names the key of an account.

        Raises RateLimitError, and counts nothing, if one of the subjects would exceed its limit.
        Raises StoreUnavailableError.
        """
        counted = counted_for(holder.subjects)
        is_brief = is_brief and len(counted) == 1 and holder.tenant_id not in self._near
        is_free = use is Use.RUNNING or (is_brief and not self._must_read(holder.tenant_id, size))
        if size < SMALL_BYTES and is_free:
            return 0
        more = size - before
        try:
            await self._look_if_due()
            limits = [self.in_force(each, use).limits.stored_bytes or 0 for each in counted]
            if use is Use.OPTIONAL:
                limits = [limit // 2 for limit in limits]
            self._taken += more
            refusing, *used = await self._keep(
                holder, size, live_ms=live_ms, limits=limits, is_account=is_account
            )
        except RedisError:
            raise queue_unavailable() from None
        if not refusing:
            return size
        self._taken = max(self._taken - more, 0)
        subject, limit = counted[refusing - 1], limits[refusing - 1]
        own = subject.limits.stored_bytes
        is_shrunk = limit < (self._most_of_tenant if own is None else own)
        # What exceeds a limit that grows again may fit later.
        wanted = 1 if is_shrunk else size
        refused = Refused(subject, LimitName.STORED_BYTES, limit, used[0], wanted, None)
        raise refusal_error(refused, is_openai=False)

    async def take_for_user(
        self, tenant_id: str, subjects: Sequence[SubjectLimits], user: SubjectLimits
    ) -> None:
        """Count the account of an end user, until it expires, for these subjects.

        Raises RateLimitError and StoreUnavailableError.
        """
        if user.spending is None or not user.spending.user:
            return
        account = keys.account(keys.bucket_of(tenant_id), user.subject)
        live_ms = max(user.spending.bounds.after * 1000 - clock.now_ms(), 1)
        holder = Holder(tenant_id, subjects, account)
        await self.take(holder, USER_BYTES, live_ms=live_ms, is_account=True)

    def _must_read(self, tenant_id: str, size: int) -> bool:
        """Note a small response. Return whether to read how much its tenant stores."""
        unread = self._unread.pop(tenant_id, 0) + size
        if unread >= SMALL_STEP:
            return True
        self._unread[tenant_id] = unread
        if len(self._unread) > MOST_TENANTS:
            del self._unread[next(iter(self._unread))]
        return False

    async def settle(self, holder: Holder, size: int, *, live_ms: int) -> None:
        """Count the actual bytes of a running request, regardless of the limits.

        If Redis does not respond, the bytes expire.
        """
        try:
            await self._keep(holder, size, live_ms=live_ms)
        except RedisError as error:
            logger.warning("cannot count stored bytes: %s", type(error).__name__)

    async def used(self, tenant_id: str, subjects: Sequence[SubjectLimits]) -> list[int]:
        """Return the bytes of each subject, in order; 0 for one that is not counted.

        Raises RedisError.
        """
        counted = counted_for(subjects)
        if not counted:
            return [0] * len(subjects)
        await self._look_if_due()
        _, *used = await self._keep(Holder(tenant_id, subjects, ""), None)
        by_subject = dict(zip((each.subject for each in counted), used, strict=True))
        return [by_subject.get(each.subject, 0) for each in subjects]

    async def _look_if_due(self) -> None:
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + MEMORY_SECONDS
            looking = self._tasks.task(self._look_at_memory())
            # A server that does not respond must not delay requests that need others.
            if now >= self._old_at:
                await wait_for_end(looking, timeout_seconds=LOOK_SECONDS)

    async def _look_at_memory(self) -> None:
        try:
            servers = await ask_every_server(self._executor, "INFO", "memory")
        except RedisError:
            return  # Of several servers, the one that has these bytes may respond.
        self._memory = [
            (each["used_memory"], each["maxmemory"]) for each in servers if each is not None
        ]
        self._old_at = time.monotonic() + OLD_SECONDS
        self._taken, self._taken_before = 0, self._taken

    async def _keep(
        self,
        holder: Holder,
        size: int | None,
        *,
        live_ms: int = 0,
        limits: Sequence[int] = (),
        is_account: bool = False,
    ) -> list[int]:
        bucket, subjects = keys.bucket_of(holder.tenant_id), counted_for(holder.subjects)
        name = holder.request_id
        reply: list[int] = await _KEEP.run(
            self._executor,
            record=name if is_account else keys.request(bucket, name),
            ends_prefix=keys.stored_ends.prefix(bucket),
            bytes_prefix=keys.stored_bytes.prefix(bucket),
            names=msgspec.msgpack.encode([each.subject for each in subjects]),
            bytes="" if size is None else size,
            live_ms=live_ms,
            arguments=limits,
        )
        for subject, used in zip(subjects, reply[1:], strict=False):
            if subject.scope is LimitScope.TENANT:
                limit = self.in_force(subject).limits.stored_bytes or 0
                note = self._near.add if used > NEAR * limit else self._near.discard
                note(holder.tenant_id)
        return reply

"""Storage quota: bytes in Redis of waiting and running requests and of stored responses."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from redis.exceptions import RedisError

from common.tasks import in_background
from contract import keys
from contract.scripts import CommandExecutor, LuaScript
from contract.scripts.cluster import ask_every_server
from gateway.limits.refusals import refusal_error
from gateway.limits.replies import Refused
from gateway.records.errors import queue_unavailable
from gateway.records.limits import LimitName, LimitScope, SubjectLimits

SMALL_BYTES: Final = 16_384
"""Smaller requests are not counted unless they are stored for long: their number is bounded."""

TENANTS_IN_MEMORY: Final = 4
"""A tenant without its own limit never holds more than this part of Redis's maximum memory."""
OPTIONAL_SHARE: Final = 0.5
"""Part of a limit, and of Redis's maximum memory, beyond which nothing optional is stored."""
LOOK_SECONDS: Final = 10.0
"""How often the maximum memory of Redis is read, which operators may change."""

_NO_LIMIT: Final = -1
_KEEP = LuaScript("quota_keep", "gateway.limits.scripts")

logger = logging.getLogger(__name__)


class Holder(NamedTuple):
    """A request whose bytes are counted, and the subjects that they count for."""

    tenant_id: str
    subjects: Sequence[SubjectLimits]
    request_id: str


class Storage:
    """Counts and limits the bytes of tenants, projects and keys in Redis.

    It always counts for the tenant, and for the project and the key if their `stored_bytes` are
    limited. All subjects of one call belong to the same tenant.
    """

    def __init__(self, executor: CommandExecutor, *, most_of_tenant: int) -> None:
        """Limit each tenant without its own limit to `most_of_tenant` bytes.

        It is limited to a quarter of Redis's maximum memory if that is less.
        """
        self._executor = executor
        self._most_of_tenant = self._set_most = most_of_tenant
        self._look_at = 0.0
        self._is_filling = False

    def in_force(self, subject: SubjectLimits) -> SubjectLimits:
        """Return a subject with its effective `stored_bytes`: a tenant always has a limit."""
        limits = subject.limits
        if subject.scope is not LimitScope.TENANT or limits.stored_bytes is not None:
            return subject
        return replace(subject, limits=replace(limits, stored_bytes=self._most_of_tenant))

    def _counted(self, subjects: Sequence[SubjectLimits]) -> list[SubjectLimits]:
        return [
            each for each in map(self.in_force, subjects) if each.limits.stored_bytes is not None
        ]

    async def take(
        self, holder: Holder, size: int, *, live_ms: int, is_optional: bool = False
    ) -> None:
        """Count the bytes of a request, for at most `live_ms` milliseconds.

        Raises RateLimitError, and counts nothing, if one of the subjects would exceed its limit.
        Raises StoreUnavailableError, also if these bytes are optional while Redis is filling.
        """
        share = OPTIONAL_SHARE if is_optional else 1
        try:
            if not self._look_at:
                await self._look_at_memory()
            elif time.monotonic() >= self._look_at:
                # A server that does not respond must not delay requests that need others.
                in_background(self._look_at_memory())
            if is_optional and self._is_filling:
                raise queue_unavailable()
            counted = self._counted(holder.subjects)
            found = (each.limits.stored_bytes for each in counted)
            limits = [int(share * limit) for limit in found if limit is not None]
            refusing, *used = await self._keep(holder, size, live_ms=live_ms, limits=limits)
        except RedisError:
            raise queue_unavailable() from None
        if refusing:
            subject, limit = counted[refusing - 1], limits[refusing - 1]
            refused = Refused(subject, LimitName.STORED_BYTES, limit, used[0], size, None)
            raise refusal_error(refused, is_openai=False)

    async def settle(self, holder: Holder, size: int, *, live_ms: int) -> None:
        """Count the actual bytes of a request, regardless of the limits; 0 returns its bytes.

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
        counted = self._counted(subjects)
        if not counted:
            return [0] * len(subjects)
        _, *used = await self._keep(Holder(tenant_id, subjects, ""), 0, live_ms=0)
        by_subject = dict(zip((each.subject for each in counted), used, strict=True))
        return [by_subject.get(each.subject, 0) for each in subjects]

    async def _look_at_memory(self) -> None:
        self._look_at = time.monotonic() + LOOK_SECONDS
        key = keys.response("")
        try:
            replies = await ask_every_server(self._executor, "INFO", "memory", key=key)
        except RedisError:
            return
        servers = [each for each in replies if each is not None]
        self._is_filling = any(
            each["used_memory"] > OPTIONAL_SHARE * each["maxmemory"] > 0 for each in servers
        )
        share = min(each["maxmemory"] for each in servers) // TENANTS_IN_MEMORY
        self._most_of_tenant = min(self._set_most, share or self._set_most)

    async def _keep(
        self, holder: Holder, size: int, *, live_ms: int, limits: Sequence[int] = ()
    ) -> list[int]:
        bucket, subjects = keys.bucket_of(holder.tenant_id), self._counted(holder.subjects)
        names = [
            key(bucket, each.subject)
            for each in subjects
            for key in (keys.stored_ends, keys.stored_bytes)
        ]
        reply: list[int] = await _KEEP.run(
            self._executor,
            keys=names,
            id=holder.request_id,
            bytes=size,
            live_ms=live_ms,
            arguments=limits or [_NO_LIMIT] * len(subjects),
        )
        return reply

"""The latest requests of each tenant that a limit rejected, for the people who ask why.

A gateway counts equal rejections and writes them to Redis once a second, so that a client that
retries without a pause costs no command for each rejection. The log is not the truth about usage:
the rejections of the last second are lost with their gateway.
"""

from typing import Final

import msgspec

from common import clock
from common.tasks import repeat
from contract import keys
from contract.scripts import CommandExecutor
from gateway.records.errors import InsufficientQuotaError, RateLimitError

KEPT: Final = 100
"""Entries for each tenant."""
KEPT_SECONDS: Final = 7 * 24 * 3600
FLUSH_SECONDS: Final = 1.0
MOST_PENDING: Final = 10_000
"""Entries that a gateway holds; further ones of that second are dropped."""


class Refusal(msgspec.Struct, frozen=True):
    """Equal rejections of one credential within a second."""

    at_ms: int
    """Unix time of the first one."""
    credential_id: str
    project_id: str | None
    model: str
    code: str
    limit: str
    scope: str
    message: str
    """What the first client received."""
    times: int = 1


class RefusalLog:
    """Writes and reads the log. Reading raises RedisError."""

    def __init__(self, executor: CommandExecutor) -> None:
        self._executor = executor
        self._pending: dict[tuple[str, str, str, str], Refusal] = {}

    def note(
        self,
        tenant_id: str,
        error: RateLimitError | InsufficientQuotaError,
        *,
        credential_id: str,
        project_id: str | None,
        model: str,
    ) -> None:
        """Record that a limit rejected a request."""
        refusing = error.refusing
        if refusing is None:
            return
        key = tenant_id, credential_id, refusing.scope, refusing.limit
        if (known := self._pending.get(key)) is not None:
            self._pending[key] = msgspec.structs.replace(known, times=known.times + 1)
        elif len(self._pending) < MOST_PENDING:
            self._pending[key] = Refusal(
                at_ms=clock.now_ms(),
                credential_id=credential_id,
                project_id=project_id,
                model=model,
                code=error.code,
                limit=refusing.limit,
                scope=refusing.scope,
                message=error.message,
            )

    async def run(self) -> None:
        """Write the entries each second until cancelled."""
        await repeat("write rejected requests", self.flush, seconds=FLUSH_SECONDS)

    async def flush(self) -> None:
        """Write the entries, which are dropped if that fails. Raises RedisError."""
        pending, self._pending = self._pending, {}
        by_tenant: dict[str, list[bytes]] = {}
        for (tenant_id, *_), refusal in pending.items():
            by_tenant.setdefault(tenant_id, []).append(msgspec.msgpack.encode(refusal))
        for tenant_id, entries in by_tenant.items():
            key = keys.refusals(tenant_id)
            await self._executor.execute_command("LPUSH", key, *entries[:KEPT])
            await self._executor.execute_command("LTRIM", key, 0, KEPT - 1)
            await self._executor.execute_command("EXPIRE", key, KEPT_SECONDS)

    async def latest(
        self, tenant_id: str, *, credential_id: str | None = None, project_id: str | None = None
    ) -> list[Refusal]:
        """Return the tenant's latest entries, newest first; only of a credential or project."""
        found: list[bytes] = await self._executor.execute_command(
            "LRANGE", keys.refusals(tenant_id), 0, KEPT - 1
        )
        entries = [msgspec.msgpack.decode(each, type=Refusal) for each in found]
        return [
            each
            for each in entries
            if credential_id in (None, each.credential_id) and project_id in (None, each.project_id)
        ]

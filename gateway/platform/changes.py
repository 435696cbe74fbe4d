"""Announce changes to all gateways, which then invalidate their caches or look for lines."""

from typing import Any, Final

from redis.asyncio import Redis

from contract import keys
from gateway.platform.redis_client import converting_errors
from gateway.records.errors import ChangeNotAnnouncedError, StoreUnavailableError
from gateway.records.limits import LimitScope, subject_of

MAX_EVENTS: Final = 10_000
"""Approximate number of entries in the stream; a gateway that lags further detects the gap."""

ACCOUNT_MS: Final = 3_456_000_000
"""How long a subject's counters are kept after the last change: forty days."""

_CONSEQUENCE: Final = (
    "gateways apply it only when their caches expire (SLUICE_KEY_CACHE_TTL, a minute by default). "
    "Repeat the command when Redis is available again."
)


class ChangeAnnouncer:
    """Appends to the stream that every gateway follows. Call it after the commit."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def key_changed(self, key_id: str) -> None:
        """Announce that this key has changed."""
        await self._announce({"key": key_id})

    async def tenant_changed(self, tenant_id: str) -> None:
        """Announce that this tenant's status or options have changed."""
        await self._announce({"tenant": tenant_id})

    async def plan_changed(self) -> None:
        """Announce that limits of many tenants may have changed."""
        await self._announce({"all": "plans"})

    async def prices_changed(self) -> None:
        """Announce that the price table has grown."""
        await self._announce({"prices": "all"})

    async def aliases_changed(self) -> None:
        """Announce that an alias was added, changed or removed."""
        await self._announce({"aliases": "all"})

    async def lines_released(self) -> None:
        """Announce that gateways may claim lines of batches."""
        await self._announce({"lines": "released"})

    async def adapters_changed(self) -> None:
        """Announce that the table of adapters has changed."""
        await self._announce({"adapters": "all"})

    async def credits_changed(self, tenant_id: str) -> None:
        """Mark the tenant's balance to be derived again from the database.

        Raises StoreUnavailableError.
        """
        account = keys.account(keys.bucket_of(tenant_id), subject_of(LimitScope.TENANT, tenant_id))
        # The version increases, so a balance whose derivation is in progress is not written.
        commands = self._redis.pipeline(transaction=True)
        commands.execute_command("HINCRBY", account, "v", 1)
        commands.execute_command("HDEL", account, "seeded")
        commands.execute_command("PEXPIRE", account, ACCOUNT_MS)
        with converting_errors(self._redis):
            await commands.execute()

    async def _announce(self, event: dict[Any, Any]) -> None:
        try:
            with converting_errors(self._redis):
                await self._redis.xadd(keys.KEY_EVENTS, event, maxlen=MAX_EVENTS, approximate=True)
        except StoreUnavailableError as error:
            raise ChangeNotAnnouncedError(
                f"The change is saved, but Redis is unavailable: {_CONSEQUENCE}",
                detail=f"{error.detail} The change is saved, but {_CONSEQUENCE}",
            ) from error

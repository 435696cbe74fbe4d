"""Announce changed keys and tenants to all gateways, which then invalidate their caches."""

from collections.abc import Awaitable
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract import keys
from gateway.errors import ChangeNotAnnouncedError
from gateway.tenancy.limits import LimitScope, subject_of

MAX_EVENTS: Final = 10_000
"""Approximate number of entries in the stream; a gateway that lags further detects the gap."""

ACCOUNT_MS: Final = 3_456_000_000
"""How long a subject's counters are kept after the last change: forty days."""


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

    async def credits_changed(self, tenant_id: str) -> None:
        """Mark the tenant's balance to be derived again from the database."""
        account = keys.account(keys.bucket_of(tenant_id), subject_of(LimitScope.TENANT, tenant_id))
        # The version increases, so a balance whose derivation is in progress is not written.
        commands = self._redis.pipeline(transaction=True)
        commands.execute_command("HINCRBY", account, "v", 1)
        commands.execute_command("HDEL", account, "seeded")
        commands.execute_command("PEXPIRE", account, ACCOUNT_MS)
        await self._send(commands.execute())

    async def _announce(self, event: dict[str, str]) -> None:
        # redis-py declares the mapping invariantly, in types that str keys and values satisfy.
        await self._send(
            self._redis.xadd(
                keys.KEY_EVENTS,
                event,  # type: ignore[arg-type]
                maxlen=MAX_EVENTS,
                approximate=True,
            )
        )

    @staticmethod
    async def _send(command: Awaitable[Any]) -> None:
        try:
            await command
        except (RedisError, OSError) as error:
            raise ChangeNotAnnouncedError(
                "The change is saved, but Redis is unavailable: gateways apply the change only "
                "when their caches expire (SLUICE_KEY_CACHE_TTL, a minute by default). Repeat the "
                "command when Redis is available again."
            ) from error

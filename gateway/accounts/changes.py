"""Tells all gateways that a key or a tenant has changed, so that they stop believing their caches."""

from typing import Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract import keys
from gateway.errors import ChangeNotAnnouncedError

MAX_EVENTS: Final = 10_000
"""Entries the stream keeps, about; a gateway that was away for longer notices the gap."""


class ChangeAnnouncer:
    """Appends to the stream that every gateway follows. To be called after the commit."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def key_changed(self, key_id: str) -> None:
        """Announce that this key is not what it was."""
        await self._announce({"key": key_id})

    async def tenant_changed(self, tenant_id: str) -> None:
        """Announce that this tenant's status or options changed."""
        await self._announce({"tenant": tenant_id})

    async def _announce(self, event: dict[str, str]) -> None:
        try:
            # redis-py declares the mapping invariantly in types that str keys and values satisfy.
            await self._redis.xadd(
                keys.KEY_EVENTS,
                event,  # type: ignore[arg-type]
                maxlen=MAX_EVENTS,
                approximate=True,
            )
        except (RedisError, OSError) as error:
            raise ChangeNotAnnouncedError(
                "The change is saved, but Redis could not be told: gateways honour it only when their "
                "caches expire (SLUICE_KEY_CACHE_TTL, a minute by default). Repeat the command when "
                "Redis is back."
            ) from error
